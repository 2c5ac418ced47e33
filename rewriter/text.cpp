#include "rewriter/text.h"

#include <fnmatch.h>

#include <algorithm>

namespace tsmem {

static size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i)
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

std::string nearest(const std::string& typo, const std::vector<std::string>& names) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, typo.size() / 3) + 1;
  for (const std::string& name : names)
    if (const size_t d = distance(typo, name); d < best_distance) {
      best_distance = d;
      best = name;
    }
  return best;
}

static std::vector<std::string> parts(const std::string& s) {
  std::vector<std::string> out;
  for (size_t from = 0; from <= s.size() && !s.empty();) {
    const size_t to = std::min(s.find('.', from), s.size());
    out.push_back(s.substr(from, to - from));
    from = to + 1;
  }
  return out;
}

static bool match_parts(const std::vector<std::string>& glob, size_t g, const std::vector<std::string>& path,
                        size_t p) {
  if (g == glob.size()) return p == path.size();
  if (glob[g] == "**") {
    for (size_t k = p; k <= path.size(); ++k)
      if (match_parts(glob, g + 1, path, k)) return true;
    return false;
  }
  return p < path.size() && fnmatch(glob[g].c_str(), path[p].c_str(), 0) == 0 && match_parts(glob, g + 1, path, p + 1);
}

bool glob_match(const std::string& glob, const std::string& path) {
  return match_parts(parts(glob), 0, parts(path), 0);
}

bool glob_covers(const std::string& glob, const std::string& path) {
  for (std::string p = path;; p = p.substr(0, p.rfind('.'))) {
    if (glob_match(glob, p)) return true;
    if (p.find('.') == std::string::npos) return glob_match(glob, "");
  }
}

std::string_view strip(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n"), last = text.find_last_not_of(" \t\r\n");
  return first == text.npos ? std::string_view() : text.substr(first, last - first + 1);
}

std::string paint(std::string_view text, Color color, bool use) {
  static const char* const codes[] = {"1", "31", "32", "36", "2"};
  if (!use) return std::string(text);
  return std::string("\033[").append(codes[static_cast<int>(color)]).append("m").append(text).append("\033[0m");
}

}  // namespace tsmem
