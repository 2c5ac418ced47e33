// The difference between two modules' graphs, as plain data; renderers apart.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <torch/csrc/jit/api/module.h>

#include <map>
#include <string>
#include <vector>

namespace tsmem {

struct MethodDiff {
  std::string path, method;   // module path of the class's first instance; method name
  std::string status;         // "same", "changed", "added", "removed"
  std::map<std::string, int> removed_ops, added_ops;
  std::vector<std::string> a, b;  // the graphs' lines with normalised value names
};

// Values that only changed their number are no difference. `method` empty: every method of every class.
std::vector<MethodDiff> diff(const torch::jit::Module& a, const torch::jit::Module& b, const std::string& method = "");

std::string render_text(const std::vector<MethodDiff>& d, bool stat_only, bool color);
nlohmann::json to_json(const std::vector<MethodDiff>& d);

}  // namespace tsmem
