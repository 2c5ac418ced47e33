#include "cli/saved.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "cli/cli.h"

namespace tsmem::cli {
namespace {

// Stays of one operator and reason, over all modules.
struct Row {
  std::string op, reason;
  Why why;
  std::vector<std::string> modules;
  int64_t tensors = 0, bytes = 0;
};

std::vector<Row> rows_of(const Saved& saved) {
  std::vector<Row> rows;
  std::map<std::pair<std::string, std::string>, size_t> places;
  for (const Stay& s : saved.stays) {
    const auto [place, fresh] = places.try_emplace({s.op, s.reason}, rows.size());
    if (fresh) rows.push_back({s.op, s.reason, s.why, {}});
    Row& row = rows[place->second];
    if (std::find(row.modules.begin(), row.modules.end(), s.module) == row.modules.end())
      row.modules.push_back(s.module);
    row.tensors += s.tensors;
    row.bytes += s.bytes.value_or(0);
  }
  const bool measured = saved.bytes.has_value();
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const Row& a, const Row& b) { return measured ? a.bytes > b.bytes : a.tensors > b.tensors; });
  return rows;
}

std::string percent(int64_t part, int64_t whole) {
  return fmt::format("{:.0f} %", whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0.0);
}

std::string modules_text(const std::vector<std::string>& modules) {
  std::string text;
  for (size_t i = 0; i < modules.size() && i < 2; ++i)
    text += (i ? ", " : "") + (modules[i].empty() ? "the model itself" : modules[i]);
  return modules.size() > 2 ? fmt::format("{} and {} more", text, modules.size() - 2) : text;
}

std::string head(const Saved& saved) {
  if (saved.bytes) {
    if (*saved.original_bytes == 0) return "The original saves nothing for backward.\n";
    return fmt::format("Saved for backward: {} of the original's {} ({}; {} goes)\n", bytes_text(*saved.bytes),
                       bytes_text(*saved.original_bytes), percent(*saved.bytes, *saved.original_bytes),
                       percent(*saved.original_bytes - *saved.bytes, *saved.original_bytes));
  }
  if (saved.original_tensors == 0) return "";
  return fmt::format("Saved for backward, by the graph: {} of the original's {} (bytes need --input)\n", saved.tensors,
                     counted(static_cast<size_t>(saved.original_tensors), "tensor"));
}

// Which options would go further, for the reasons that matter: a tenth of what is left, or more.
std::string further(const Saved& saved, Level level) {
  std::map<Why, int64_t> sizes;
  std::map<std::string, int64_t> keepers;  // modules whose operators tsmem can't replace
  int64_t all = 0;
  for (const Stay& s : saved.stays) {
    const int64_t size = saved.bytes ? s.bytes.value_or(0) : s.tensors;
    all += size;
    sizes[s.why] += size;
    const bool stuck = s.why == Why::no_operator || s.why == Why::not_replaced || s.why == Why::unknown;
    if (stuck && !s.keeper_module.empty()) keepers[s.keeper_module] += size;
  }
  const auto matters = [&](int64_t size) { return size > 0 && 10 * size >= all; };
  std::vector<std::string> options;
  if (matters(sizes[Why::level_ops])) options.push_back("--level regions recomputes norms, activations and the like");
  if (matters(sizes[Why::expensive]))
    options.push_back(level == Level::plan
                          ? "a smaller --budget runs more convolutions, linear layers and the like again"
                          : "--budget 40% (with --input) runs convolutions, linear layers and the like "
                            "again where that costs the least time");
  const auto largest = std::max_element(keepers.begin(), keepers.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
  if (largest != keepers.end() && matters(largest->second) && level != Level::ops)
    options.push_back(
        fmt::format("--checkpoint '{}' keeps that module's arguments alone and runs it again", largest->first));
  std::string text;
  for (const std::string& option : options) text += (text.empty() ? "  To go further: " : "; ") + option;
  return text.empty() ? "" : text + ".\n";
}

}  // namespace

std::string saved_text(const Saved& saved, Level level, bool all) {
  std::string text = head(saved);
  if (text.empty() || saved.stays.empty()) return text;
  constexpr size_t kShown = 4;
  const auto rows = rows_of(saved);
  const int64_t whole = saved.bytes.value_or(saved.tensors);
  int64_t rest = 0;
  std::vector<std::vector<std::string>> cells;
  size_t folded = 0;
  for (const Row& row : rows) {
    const int64_t size = saved.bytes ? row.bytes : row.tensors;
    // The first ones, as long as they are worth a line.
    if (!all && (cells.size() >= kShown || (!cells.empty() && 50 * size < whole))) {
      rest += size;
      ++folded;
      continue;
    }
    cells.push_back({saved.bytes ? percent(size, whole) : std::to_string(size),
                     row.op.empty() ? "(no operator)" : row.op, modules_text(row.modules), row.reason});
  }
  size_t widths[3] = {0, 0, 0};
  for (const auto& row : cells)
    for (size_t c = 0; c < 3; ++c) widths[c] = std::max(widths[c], row[c].size());
  for (const auto& row : cells)
    text +=
        fmt::format("  {:>{}}  {:<{}}  {:<{}}  {}\n", row[0], widths[0], row[1], widths[1], row[2], widths[2], row[3]);
  if (folded)
    text += fmt::format("  {:>{}}  for {}; --explain shows all\n",
                        saved.bytes ? percent(rest, whole) : std::to_string(rest), widths[0],
                        counted(folded, "other reason"));
  return text + further(saved, level);
}

}  // namespace tsmem::cli
