#include "patterns/same_schema.h"

namespace tsmem {

Rule same_schema(const std::string& op, size_t arguments, std::set<std::string> intact) {
  std::string list;
  for (size_t i = 0; i < arguments; ++i) list += (i ? ", %a" : "%a") + std::to_string(i);
  return {.match = "%z = " + op + "(" + list + ")",
          .rewrite = "%z = tsmem::" + op + "(" + list + ")",
          .intact = std::move(intact)};
}

}  // namespace tsmem
