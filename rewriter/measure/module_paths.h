// Which module's method runs, read from TorchScript's interpreter.
#pragma once
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace tsmem {

// A module of the tree: its path, "" for the root, and itself.
struct ModulePlace {
  std::string path;
  c10::intrusive_ptr<c10::ivalue::Object> object;
};

// The module whose method runs, from the interpreter's call stack. Its entries name an instance by its last name alone
// ("0(Conv2d)::forward"), which a model with two module lists does not tell apart; so each call is looked up in the
// caller's graph by its place in the source, and the attributes that lead to the callee are read there. From any
// thread.
class ModulePaths {
 public:
  explicit ModulePaths(const torch::jit::Module& root) : root_{"", root._ivalue()} {}

  // `from`: the module whose method began this call stack, where it is not the root. `op`: the operator that runs: one
  // that reads the parameters and buffers of a module inside is that module's (a rewritten one stands in its caller's
  // code). Nothing inside a graph that TorchScript has differentiated, whose nodes have forgotten where they come from.
  std::optional<ModulePlace> current(const ModulePlace* from = nullptr, const std::string& op = "");

  // The module whose method the running operator (tsmem::checkpoint, tsmem::autocast), called by `caller`'s code,
  // calls.
  ModulePlace called(ModulePlace caller, const std::string& op);

 private:
  using Key = std::tuple<const c10::ClassType*, std::string, size_t, size_t, std::string, std::string>;

  bool follow(ModulePlace& at, const torch::jit::StackEntry& call, c10::Symbol kind, const std::string& instance,
              const std::string& method);
  const std::vector<std::string>& steps(const c10::ClassTypePtr& type, const torch::jit::StackEntry& call,
                                        c10::Symbol kind, const std::string& instance, const std::string& method);

  // Goes on to the module inside whose parameters the operator reads, if there is one.
  void enter_owner(ModulePlace& at, const torch::jit::StackEntry& call, const std::string& op);

  ModulePlace root_;
  std::mutex mutex_;
  std::map<Key, std::vector<std::string>> cache_;
  std::map<Key, std::string> owners_;
};

}  // namespace tsmem
