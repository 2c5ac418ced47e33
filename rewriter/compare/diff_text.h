// A difference in words, as rows of two columns and as JSON.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

#include "rewriter/compare/diff.h"

namespace tsmem {

// The operators that went and came, as changed_ops() gives them: "  - aten::relu x2\n  + tsmem::act x2\n"
std::string ops_lines(const MethodDiff& d, bool color);

// A line of each side in one row: the same one, one that went beside one that came, or one alone.
struct Row {
  std::optional<size_t> a, b;  // indices into MethodDiff's lines
};

// The lines of both graphs, equal ones beside each other, and those that went beside those that came in their place.
std::vector<Row> side_by_side(const MethodDiff& d);

// `stat_only`: operators that went and came; else also the changed lines, three lines of context around them.
std::string render_text(const std::vector<MethodDiff>& d, bool stat_only, bool color);
nlohmann::json to_json(const std::vector<MethodDiff>& d);

}  // namespace tsmem
