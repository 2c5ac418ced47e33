#include "rewriter/stays/stays.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "ops/traits.h"
#include "patterns/pattern.h"
#include "rewriter/patterns/pattern_lines.h"
#include "rewriter/rewrite/apply.h"
#include "rewriter/rewrite/canonical.h"
#include "rewriter/stays/saved_by.h"

namespace tsmem {

namespace {

bool is_ours(const std::string& op) { return op.starts_with("tsmem::"); }

// The operator's name in patterns: "aten::relu_" is "act"; those of other libraries keep theirs.
std::string name_in_patterns(const std::string& op) {
  if (!op.starts_with("aten::")) return op;
  std::string base = op.substr(6);
  if (base.size() > 1 && base.back() == '_' && base[base.size() - 2] != '_') base.pop_back();
  return known_activation(base) || base == "celu" ? "act" : base;
}

// The patterns that take an operator.
std::set<std::string> patterns_with(const std::string& op, const RewriteOptions& options) {
  const std::string name = name_in_patterns(op);
  std::set<std::string> with;
  for (const auto* list : {&options.patterns, &all_patterns()})
    for (const Pattern& p : *list)
      for (const Rule& rule : p.rules)
        for (const Line& line : canonical_lines(rule.match))
          if (line.op == name) with.insert(p.name);
  return with;
}

bool inside(const std::string& path, const std::string& outer) {
  return outer.empty() || path == outer || path.starts_with(outer + ".");
}

// What stands in the way of one of these patterns nearest to a module; "" where nothing is known.
std::string refusal(const std::set<std::string>& patterns, const std::string& module,
                    const std::vector<Refusal>& refused) {
  const Refusal* nearest = nullptr;
  for (const Refusal& r : refused)
    if (patterns.count(r.pattern) && inside(module, r.module) && (!nearest || r.module.size() > nearest->module.size()))
      nearest = &r;
  return nearest ? fmt::format("{}: {}", nearest->pattern, nearest->reason) : "";
}

struct Verdict {
  Why why;
  std::string reason;
};

// What may write to what an operator of a module has read; "" where nothing may.
std::string overwritten_by(const SavedTensor& k, const std::vector<Match>& matches) {
  const auto m = std::find_if(matches.begin(), matches.end(), [&](const Match& match) {
    return !match.overwritten_by.empty() && match.op.ends_with(k.op) && inside(k.module, match.module);
  });
  return m == matches.end() ? "" : m->overwritten_by;
}

Verdict verdict(const SavedTensor& k, const RewriteOptions& options, const RewriteReport& report) {
  const bool itself = k.op == k.keeper && k.module == k.keeper_module;
  if (!is_ours(k.keeper)) {
    const auto patterns = patterns_with(k.keeper, options);
    if (!patterns.empty()) {
      const std::string why_not = refusal(patterns, k.keeper_module, report.refused);
      return {Why::not_replaced, fmt::format("{} needs it, which no pattern takes there{}", k.keeper,
                                             why_not.empty() ? "" : fmt::format(" ({})", why_not))};
    }
    if (k.unknown)
      return {Why::unknown, fmt::format("tsmem has no operator for {}, nor knows what it keeps", k.keeper)};
    return {Why::no_operator, itself ? fmt::format("tsmem has no operator for {}, which keeps it", k.keeper)
                                     : fmt::format("{} needs it, for which tsmem has no operator", k.keeper)};
  }
  if (itself) return {Why::own, fmt::format("{} needs it for its own backward", k.keeper)};
  if (traits_of(k.op).expensive)
    return {Why::expensive,
            options.level == Level::plan
                ? fmt::format("{} needs it, and by this plan it is kept", k.keeper)
                : fmt::format("{} needs it, and {} is too expensive to run again without a budget", k.keeper, k.op)};
  if (!is_ours(k.op) || offers_recompute(k.op) == Offers::nothing)
    return {Why::not_offered, fmt::format("{} needs it, and {} can't be run again in backward", k.keeper, k.op)};
  if (options.level == Level::ops)
    return {Why::level_ops, fmt::format("{} needs it, and at this level nothing is recomputed", k.keeper)};
  if (const std::string by = overwritten_by(k, report.matches); !by.empty())
    return {Why::overwritten,
            fmt::format("{} needs it, and {} may overwrite what it would be recomputed from", k.keeper, by)};
  return {Why::sources,
          fmt::format("{} needs it, and recomputing it would take tensors that are gone or as large", k.keeper)};
}

}  // namespace

std::vector<Stay> stays_of(const std::vector<SavedTensor>& saved, const RewriteOptions& options,
                           const RewriteReport& report) {
  std::vector<Stay> stays;
  std::map<std::tuple<std::string, std::string, std::string, std::string>, size_t> places;
  for (const SavedTensor& s : saved) {
    const auto [place, fresh] = places.try_emplace({s.op, s.module, s.keeper, s.keeper_module}, stays.size());
    if (fresh) {
      auto [why, reason] = verdict(s, options, report);
      stays.push_back({s.op, s.module, s.keeper, s.keeper_module, 0, {}, why, std::move(reason)});
    }
    Stay& stay = stays[place->second];
    ++stay.tensors;
    if (s.bytes) stay.bytes = stay.bytes.value_or(0) + *s.bytes;
  }
  std::stable_sort(stays.begin(), stays.end(),
                   [](const Stay& a, const Stay& b) { return a.bytes.value_or(-1) > b.bytes.value_or(-1); });
  return stays;
}

}  // namespace tsmem
