#include "rewriter/plan/size.h"

#include <fmt/format.h>

#include <cmath>
#include <map>

#include "rewriter/error.h"

namespace tsmem {

int64_t parse_size(const std::string& text, const std::string& option, int64_t whole) {
  static const std::map<std::string, double> units = {{"", 1},
                                                      {"B", 1},
                                                      {"K", 1024.},
                                                      {"KiB", 1024.},
                                                      {"KB", 1e3},
                                                      {"M", 1 << 20},
                                                      {"MiB", 1 << 20},
                                                      {"MB", 1e6},
                                                      {"G", 1 << 30},
                                                      {"GiB", 1 << 30},
                                                      {"GB", 1e9},
                                                      {"T", 1024. * (1 << 30)},
                                                      {"TiB", 1024. * (1 << 30)},
                                                      {"TB", 1e12}};
  const auto wrong = [&] {
    return Error(ErrorKind::request, fmt::format("{} '{}' is not a size: write 2GiB, 1500MiB, bytes{}.", option, text,
                                                 whole > 0 ? ", or 40% of the original's" : ""));
  };
  size_t end = 0;
  double number = 0;
  try {
    number = std::stod(text, &end);
  } catch (const std::exception&) {
    throw wrong();
  }
  while (end < text.size() && text[end] == ' ') ++end;
  const std::string unit = text.substr(end);
  // Nobody means 40 bytes.
  constexpr double kLeastBytes = 1000;
  if (unit.empty() && number > 0 && number < kLeastBytes) {
    const bool part = whole > 0 && number <= 100;
    throw Error(ErrorKind::request,
                fmt::format("{} '{}' is {} bytes: do you mean {}{}MiB?", option, text, text,
                            part ? fmt::format("{}% of the original's peak, or ", text) : "", text));
  }
  double bytes = 0;
  if (unit == "%" && whole > 0)
    bytes = number / 100 * static_cast<double>(whole);
  else if (auto it = units.find(unit); it != units.end())
    bytes = number * it->second;
  else
    throw wrong();
  if (!std::isfinite(bytes) || bytes <= 0 || bytes > 9e18) throw wrong();
  return static_cast<int64_t>(bytes);
}

}  // namespace tsmem
