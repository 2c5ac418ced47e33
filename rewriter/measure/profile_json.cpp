#include <nlohmann/json.hpp>

#include "rewriter/measure/profile.h"

namespace tsmem {

nlohmann::json to_json(const Profile& p) {
  auto modules = nlohmann::json::array(), ops = nlohmann::json::array(), timeline = nlohmann::json::array();
  for (auto& m : p.modules)
    modules.push_back({{"path", m.path},
                       {"type", m.type},
                       {"saved_bytes", m.saved_bytes},
                       {"forward_bytes", m.forward_bytes},
                       {"backward_bytes", m.backward_bytes},
                       {"forward_seconds", m.forward_seconds},
                       {"backward_seconds", m.backward_seconds}});
  for (auto& o : p.ops) ops.push_back({{"op", o.op}, {"saved_bytes", o.saved_bytes}, {"count", o.count}});
  for (auto& e : p.timeline)
    timeline.push_back({{"t", e.t},
                        {"phase", e.backward ? "backward" : "forward"},
                        {"module", e.module},
                        {"op", e.op},
                        {"bytes", e.bytes}});
  return {{"input_bytes", p.input_bytes},
          {"parameter_bytes", p.parameter_bytes},
          {"saved_bytes", p.saved_bytes},
          {"peak_bytes", p.peak_bytes},
          {"forward_seconds", p.forward_seconds},
          {"backward_seconds", p.backward_seconds},
          {"step_seconds", p.step_seconds},
          {"has_backward", p.has_backward},
          {"modules", modules},
          {"ops", ops},
          {"ways", p.ways},
          {"timeline", timeline}};
}

}  // namespace tsmem
