#include "rewriter/compare/alignment.h"

#include <algorithm>
#include <dtl/dtl.hpp>
#include <unordered_map>

namespace tsmem {
namespace {

constexpr size_t kPiece = 1000, kContext = 3;

// Lines as numbers, the same for the same text.
std::vector<int> numbers(const std::vector<std::string>& lines, std::unordered_map<std::string, int>& known) {
  std::vector<int> out;
  out.reserve(lines.size());
  for (const auto& line : lines) out.push_back(known.emplace(line, static_cast<int>(known.size())).first->second);
  return out;
}

std::vector<Edit> fewest_changes(const std::vector<int>& a, const std::vector<int>& b) {
  dtl::Diff<int> diff(a, b);
  diff.onHuge();
  diff.compose();
  std::vector<Edit> out;
  for (const auto& [line, info] : diff.getSes().getSequence())
    out.push_back(info.type == dtl::SES_COMMON   ? Edit::common
                  : info.type == dtl::SES_DELETE ? Edit::removed
                                                 : Edit::added);
  return out;
}

}  // namespace

std::vector<Edit> align(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  std::unordered_map<std::string, int> known;
  const auto x = numbers(a, known), y = numbers(b, known);
  size_t i = 0, j = 0, last = 0;
  while (i < std::min(x.size(), y.size()) && x[i] == y[i]) ++i;
  j = i;
  while (last < std::min(x.size(), y.size()) - i && x[x.size() - 1 - last] == y[y.size() - 1 - last]) ++last;
  std::vector<Edit> out(i, Edit::common);
  const size_t end_x = x.size() - last, end_y = y.size() - last;
  while (i < end_x || j < end_y) {
    const size_t to_x = std::min(end_x, i + kPiece), to_y = std::min(end_y, j + kPiece);
    auto piece =
        fewest_changes({x.begin() + static_cast<std::ptrdiff_t>(i), x.begin() + static_cast<std::ptrdiff_t>(to_x)},
                       {y.begin() + static_cast<std::ptrdiff_t>(j), y.begin() + static_cast<std::ptrdiff_t>(to_y)});
    // What comes after a piece may say more of its last changes, so the next one begins with them.
    if (to_x < end_x || to_y < end_y) {
      const auto common = std::find(piece.rbegin(), piece.rend(), Edit::common);
      if (common != piece.rend()) piece.erase(common.base(), piece.end());
    }
    for (const Edit edit : piece) {
      i += edit != Edit::added;
      j += edit != Edit::removed;
    }
    out.insert(out.end(), piece.begin(), piece.end());
  }
  out.insert(out.end(), last, Edit::common);
  return out;
}

std::vector<Hunk> hunks(const std::vector<Edit>& edits) {
  std::vector<Hunk> out;
  size_t a = 0, b = 0;  // lines so far
  for (size_t i = 0; i < edits.size(); ++i) {
    const Edit edit = edits[i];
    if (edit != Edit::common) {
      if (out.empty() || i > out.back().end + 2 * kContext) {
        const size_t before = std::min(kContext, i - (out.empty() ? 0 : out.back().end));
        out.push_back({a - before + 1, before, b - before + 1, before, i - before, i});
      }
      Hunk& hunk = out.back();
      const size_t between = i - hunk.end;  // common lines
      hunk.a_count += between + (edit == Edit::removed);
      hunk.b_count += between + (edit == Edit::added);
      hunk.end = i + 1;
    }
    a += edit != Edit::added;
    b += edit != Edit::removed;
  }
  for (Hunk& hunk : out) {
    const size_t after = std::min(kContext, edits.size() - hunk.end);
    hunk.end += after;
    hunk.a_count += after;
    hunk.b_count += after;
  }
  return out;
}

}  // namespace tsmem
