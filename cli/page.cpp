#include "cli/page.h"

#include <nlohmann/json.hpp>

namespace tsmem::cli {

static void put(std::string& text, const std::string& mark, const std::string& with) {
  text.replace(text.find(mark), mark.size(), with);
}

std::string page(const std::string& title, const std::vector<std::string>& scripts, const nlohmann::json& data) {
  // In a script element nothing but "</" and "<!--" needs care.
  std::string json, plain = data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (char c : plain) json += c == '<' ? "\\u003c" : std::string(1, c);
  std::string text = kPageTemplate;
  put(text, "{{TITLE}}", title);
  std::string all;
  for (auto& script : scripts) all += "{\n" + script + "}\n";  // each with names of its own
  put(text, "{{SCRIPT}}", all);
  put(text, "{{DATA}}", json);
  return text;
}

}  // namespace tsmem::cli
