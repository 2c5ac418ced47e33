// The difference between two modules' graphs, as plain data.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tsmem/api.h"
#include "tsmem/error.h"

namespace tsmem {

struct MethodDiff {
  std::string path, method;            // module path of the class's first instance ("" for the root); method name
  std::string type;                    // the class's own name: "BasicBlock"
  std::vector<std::string> instances;  // every path with this class in both models, the first one's too
  std::string status;                  // "same", "changed", "added", "removed"
  std::map<std::string, int> removed_ops,
      added_ops;                     // "aten::relu_" -> how many fewer or more
  std::set<std::string> on_tensors;  // operators of either that have a tensor among their results
  std::vector<std::string> a, b;     // the graphs' lines with normalised value names
  bool of_torch = false;             // a method of torch.nn's own classes, or a function of torch's
};

// Compares the classes of the two module trees method by method, paired by where they stand in the tree. Beside the
// methods there is an entry "(attributes)" for a class whose attributes or their types differ, and one for each
// function of the same name whose body differs, its path being the function's module. No difference: the numbers of
// values and classes, where constants and attributes are read, the values of weights, and `_tsmem_*` methods (originals
// that are kept and never called) unless `method` names one. `method` empty: every method of every class. Throws
// Error(ErrorKind::request) where no class has such a method.
TSMEM_API std::vector<MethodDiff> diff(const torch::jit::Module& a, const torch::jit::Module& b,
                                       const std::string& method = "");

}  // namespace tsmem
