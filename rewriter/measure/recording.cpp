#include "rewriter/measure/recording.h"

#include <algorithm>
#include <iterator>

namespace tsmem {

using Origin = Recording::Origin;

static void settle(Origin& origin, const OpModules& seen, const OpModules& known) {
  for (const auto& [name, n] : origin.ops) {
    const auto it = known.find(name), own = seen.find(name);
    // The n-th run of an op is the same one only where both runs have equally many.
    if (it == known.end() || own == seen.end() || it->second.size() != own->second.size()) continue;
    if (!it->second[n]) continue;
    origin.module = *it->second[n];
    break;
  }
  origin.ops.clear();
}

const Origin* maker_of(const Recording& r, int64_t node) {
  const auto it = r.by_sequence.upper_bound(node);
  return it == r.by_sequence.begin() ? nullptr : &std::prev(it)->second;
}

// The module of the forward op that made the node.
static std::string backward_module(const Recording& r, int64_t node, const std::string& inner) {
  if (node < 0) return "";
  if (auto graph = r.graphs.find(node); graph != r.graphs.end() && !graph->second.empty()) {
    // "aten::_batch_norm_impl_index_backward" belongs to "aten::_batch_norm_impl_index".
    for (auto op = graph->second.rbegin(); op != graph->second.rend(); ++op)
      if (!op->op.empty() && inner.starts_with(op->op)) return op->module;
    return graph->second.back().module;
  }
  const Origin* maker = maker_of(r, node);
  return maker ? maker->module : "";
}

void place(Recording& r, const OpModules& known) {
  const auto settled = [&](Origin& origin) { settle(origin, r.op_modules, known); };
  for (auto& a : r.allocations)
    if (!a.backward) settled(a.origin);
  for (auto& [_, ops] : r.graphs)
    for (auto& o : ops) settled(o);
  for (auto& [_, o] : r.by_sequence) settled(o);
  for (auto& a : r.allocations)
    if (a.backward) a.origin.module = backward_module(r, a.node, a.inner);
  for (auto& s : r.spans) {
    if (s.span.backward)
      s.origin.module = backward_module(r, s.node, s.origin.op);
    else
      settled(s.origin);
    s.span.module = s.origin.module;
    s.span.op = s.origin.op;
  }
  for (auto& e : r.events)
    if (e.allocation) {
      e.event.module = r.allocations[*e.allocation].origin.module;
      e.event.op = r.allocations[*e.allocation].origin.op;
    }
}

namespace {

// The rows of a profile's modules, by path.
class Rows {
 public:
  explicit Rows(Profile& p) : profile_(p) {
    for (size_t i = 0; i < p.modules.size(); ++i) index_[p.modules[i].path] = i;
  }
  // A path that is no module's (an interface, a module out of a list held elsewhere) counts for the nearest one above
  // it.
  ModuleMemory& operator[](const std::string& path) {
    for (std::string at = path;; at = at.substr(0, at.rfind('.'))) {
      if (auto it = index_.find(at); it != index_.end()) return profile_.modules[it->second];
      if (at.find('.') == std::string::npos) return profile_.modules[index_.at("")];
    }
  }

 private:
  Profile& profile_;
  std::map<std::string, size_t> index_;
};

}  // namespace

static void add_peak(Profile& p) {
  int64_t now = 0;
  for (const Event& e : p.timeline) p.peak_bytes = std::max(p.peak_bytes, now += e.bytes);
  now = 0;
  for (size_t i = 0; i < p.timeline.size(); ++i)
    if ((now += p.timeline[i].bytes) == p.peak_bytes && p.peak_event < 0) p.peak_event = static_cast<int64_t>(i);
}

void add_to(Profile& p, Recording r) {
  p.has_backward = r.has_backward;
  Rows row(p);
  for (const auto& a : r.allocations)
    (a.backward ? row[a.origin.module].backward_bytes : row[a.origin.module].forward_bytes) += a.bytes;
  std::map<std::string, OpMemory> ops;
  for (const size_t i : r.freed) {
    const auto& a = r.allocations[i];
    p.saved_bytes += a.bytes;
    row[a.origin.module].saved_bytes += a.bytes;
    auto& op = ops.try_emplace(a.origin.op, OpMemory{a.origin.op, 0, 0}).first->second;
    op.saved_bytes += a.bytes;
    ++op.count;
  }
  for (const auto& [_, op] : ops) p.ops.push_back(op);
  std::stable_sort(p.ops.begin(), p.ops.end(), [](auto& a, auto& b) { return a.saved_bytes > b.saved_bytes; });
  for (auto& e : r.events) p.timeline.push_back(std::move(e.event));
  for (auto& s : r.spans) {
    (s.span.backward ? row[s.span.module].backward_seconds : row[s.span.module].forward_seconds) += s.span.seconds;
    p.spans.push_back(std::move(s.span));
  }
  add_peak(p);
}

}  // namespace tsmem
