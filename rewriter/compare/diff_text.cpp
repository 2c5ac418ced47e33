#include "rewriter/compare/diff_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "rewriter/compare/alignment.h"
#include "rewriter/text.h"

namespace tsmem {
namespace {

std::string where(const MethodDiff& d) {
  std::string text = d.path.empty() ? "(model)" : d.path;
  if (d.instances.size() > 1) text += fmt::format(" (and {} more)", d.instances.size() - 1);
  return text;
}

std::string ops_text(const std::map<std::string, int>& ops) {
  std::string text;
  for (auto& [op, n] : ops) text += (text.empty() ? "" : ", ") + op + (n > 1 ? fmt::format(" x{}", n) : "");
  return text;
}

std::string hunks_text(const MethodDiff& d, bool color) {
  const auto edits = align(d.a, d.b);
  std::string text;
  for (const Hunk& hunk : hunks(edits)) {
    text += paint(fmt::format("@@ -{},{} +{},{} @@", hunk.a, hunk.a_count, hunk.b, hunk.b_count), Color::cyan, color) +
            "\n";
    size_t a = hunk.a - 1, b = hunk.b - 1;
    for (size_t i = hunk.begin; i < hunk.end; ++i) {
      if (edits[i] == Edit::added) {
        text += paint("+" + d.b[b++], Color::green, color) + "\n";
        continue;
      }
      const auto& line = d.a[a++];
      text += (edits[i] == Edit::removed ? paint("-" + line, Color::red, color) : " " + line) + "\n";
      b += edits[i] == Edit::common;
    }
  }
  return text;
}

}  // namespace

std::vector<Row> side_by_side(const MethodDiff& d) {
  std::vector<Row> rows;
  size_t a = 0, b = 0, went = 0, came = 0;  // lines so far; rows of the change under way
  const auto row = [&](size_t& of_side) -> Row& {
    const size_t change = std::max(went, came);
    if (of_side++ == change) rows.emplace_back();
    return rows[rows.size() - std::max(went, came) + of_side - 1];
  };
  for (const Edit edit : align(d.a, d.b)) {
    if (edit == Edit::common) {
      went = came = 0;
      rows.push_back({a++, b++});
    } else if (edit == Edit::removed) {
      row(went).a = a++;
    } else {
      row(came).b = b++;
    }
  }
  return rows;
}

std::string ops_lines(const MethodDiff& d, bool color) {
  const auto [removed, added] = changed_ops(d);
  std::string text;
  if (!removed.empty()) text += paint("  - " + ops_text(removed), Color::red, color) + "\n";
  if (!added.empty()) text += paint("  + " + ops_text(added), Color::green, color) + "\n";
  return text;
}

std::string render_text(const std::vector<MethodDiff>& d, bool stat_only, bool color) {
  // Classes whose changes read alike (the same layer with other constants) are shown once.
  std::vector<std::pair<MethodDiff, std::string>> shown;
  std::map<std::string, size_t> index;
  size_t changed = 0;
  for (auto& m : d) {
    if (m.status == "same") continue;
    ++changed;
    auto body = ops_lines(m, color);
    if (body.empty() && m.method != "(attributes)") body = "  the same operators, put together differently\n";
    if (!stat_only) body += hunks_text(m, color) + "\n";
    auto [it, is_new] = index.emplace(m.type + "." + m.method + " " + m.status + "\n" + body, shown.size());
    if (is_new)
      shown.emplace_back(m, body);
    else
      shown[it->second].first.instances.insert(shown[it->second].first.instances.end(), m.instances.begin(),
                                               m.instances.end());
  }
  if (changed == 0) return fmt::format("No difference in {} method{}.\n", d.size(), d.size() == 1 ? "" : "s");
  std::string text;
  for (auto& [m, body] : shown) {
    auto heading = where(m) + ": " + (m.type.empty() ? "" : m.type + ".") + m.method;
    if (m.status != "changed") heading += " (" + m.status + ")";
    text += paint(heading, Color::bold, color) + "\n" + body;
  }
  return text + fmt::format("{}{} of {} methods differ.\n", stat_only ? "\n" : "", changed, d.size());
}

nlohmann::json to_json(const std::vector<MethodDiff>& d) {
  bool equal = true;
  auto methods = nlohmann::json::array();
  for (auto& m : d) {
    equal &= m.status == "same";
    methods.push_back({{"path", m.path},
                       {"method", m.method},
                       {"status", m.status},
                       {"removed_ops", m.removed_ops},
                       {"added_ops", m.added_ops},
                       {"instances", m.instances}});
  }
  return {{"equal", equal}, {"methods", methods}};
}

}  // namespace tsmem
