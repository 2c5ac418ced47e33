// The options and answers of the library's operators: JSON, with the names and values of the command line tool, '-'
// written as '_'.
#pragma once
#include <ATen/core/ivalue.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rewriter/plan/planner.h"
#include "tsmem/error.h"
#include "tsmem/pattern.h"
#include "tsmem/rewrite.h"

namespace tsmem {

// The options of one call. Each is read once; what nobody has read is unknown.
class Options {
 public:
  Options(const std::string& function, const std::string& text);

  template <class T>
  T get(const std::string& name, T otherwise = {}) {
    known_.push_back(name);
    if (!given(name)) return otherwise;
    try {
      return given_[name].get<T>();
    } catch (const nlohmann::json::exception&) {
      refuse(name);
    }
  }
  // One text or a list of them.
  std::vector<std::string> texts(const std::string& name);
  // A size: a text, or a number of bytes.
  std::string size(const std::string& name);
  bool given(const std::string& name) const;
  void check_all_known() const;

 private:
  [[noreturn]] void refuse(const std::string& name) const;

  std::string function_;
  nlohmann::json given_;
  std::vector<std::string> known_;
};

// What every function takes.
struct Run {
  std::string method, device;
  uint64_t seed;
  std::vector<std::string> specs;

  explicit Run(Options& o);
  std::string method_or_forward() const { return method.empty() ? "forward" : method; }

  // Drawn as the texts of `input` say, or `examples`, a tuple of all arguments.
  std::vector<c10::IValue> inputs(const c10::IValue& examples, const std::string& on) const;
};

// The user's own patterns, of all files that are named.
std::vector<Pattern> patterns(Options& o);
RewriteOptions rewriting(Options& o, const Run& run);
PlanOptions planning(Options& o, const Run& run);
PlanRequest plan_request(Options& o, const Run& run);
// Throws Error(ErrorKind::request) for a plan without a budget or an input, and for sizes that can't be read.
void check_plan_request(const PlanRequest& request, Level level, bool has_inputs);

// The JSON of what `work` returns, or of the error that ended it.
std::string reported(const std::function<nlohmann::json()>& work);

}  // namespace tsmem
