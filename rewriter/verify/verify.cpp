#include "rewriter/verify/verifier.h"

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include "rewriter/graph/exported_graph.h"
#include "rewriter/rewrite/view.h"
#include "rewriter/verify/depthwise.h"

namespace tsmem {

// A model's own message, at the end of a sentence, may have no full stop.
static std::string ended(const std::string& text) {
  return text.empty() || std::string(".!?").find(text.back()) != std::string::npos ? text : fmt::format("{}.", text);
}

// Of what an operator on tensors casts to by a constant: x.float(), softmax(x, dtype=torch.float32); else 0.
static double cast_epsilon(const torch::jit::Node& n) {
  const c10::FunctionSchema* schema = n.maybeSchema();
  if (!schema || n.inputs().empty() || !n.input(0)->type()->isSubtypeOf(*c10::TensorType::get())) return 0;
  const auto& arguments = schema->arguments();
  for (size_t i = 0; i < arguments.size() && i < n.inputs().size(); ++i) {
    if (arguments[i].name() != "dtype") continue;
    const auto dtype = torch::jit::toIValue(n.input(i));
    if (!dtype || !dtype->isInt()) return 0;
    const auto type = static_cast<at::ScalarType>(dtype->toInt());
    return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 ? epsilon_of(type) : 0;
  }
  return 0;
}

static Code code_of(const Module& module, const std::string& method) {
  if (!module.find_method(method)) return {};
  Scopes scopes;
  const View view = copy_graph(*toGraphFunction(module.get_method(method).function()).graph(), scopes,
                               [](const Scope*) { return true; });
  Code code;
  std::map<const torch::jit::Block*, size_t> counts;
  for (const auto& [node, _] : view.places) {
    const auto outputs = node->outputs();
    if (!node->kind().is_prim() && std::any_of(outputs.begin(), outputs.end(), [](const torch::jit::Value* v) {
          return v->type()->isSubtypeOf(*c10::TensorType::get());
        }))
      code.longest = std::max(code.longest, ++counts[node->owningBlock()]);
    code.dropout |= std::string_view(node->kind().toUnqualString()).find("dropout") != std::string_view::npos;
    code.data |= std::string_view(node->kind().toUnqualString()) == "data";
    code.narrow = std::max(code.narrow, cast_epsilon(*node));
    if (node->kind() == torch::jit::prim::CreateObject)
      code.no_grad |= node->output()->type()->annotation_str().find("grad_mode") != std::string::npos;
  }
  return code;
}

// Of one block: some passes of TorchScript's optimiser are quadratic in it. A chain of 2,000 takes 15 seconds in all
// that is compared, one of 5,000 takes 50.
constexpr size_t kMostOperators = 2000;

// What a method's own autocast rounds to; 0 where it has none.
static double autocast_epsilon(const Module& m, const VerifyOptions& options) {
  const std::string dtype = autocast_of(m, options.method);
  return dtype.empty() ? 0 : epsilon_of(dtype == "f16" ? at::kHalf : at::kBFloat16);
}

static const char* dtype_of_epsilon(double epsilon) {
  for (const auto& [dtype, name] :
       {std::pair{at::kDouble, "float64"}, std::pair{at::kHalf, "float16"}, std::pair{at::kBFloat16, "bfloat16"}})
    if (epsilon == epsilon_of(dtype)) return name;
  return "float32";
}

Verifier::Verifier(const Module& a, const Module& b, const std::vector<IValue>& inputs, const VerifyOptions& options,
                   bool share, bool as_written)
    : a_(a),
      b_(b),
      inputs_(inputs),
      options_(options),
      code_{code_of(a, options.method), code_of(b, options.method)},
      epsilon_(std::max({epsilon_of(a, inputs), autocast_epsilon(a, options), autocast_epsilon(b, options),
                         code_[0].narrow, code_[1].narrow})),
      narrow_(std::max(code_[0].narrow, code_[1].narrow)),
      own_dtype_(dtype_of_epsilon(epsilon_of(a, inputs))),
      share_(share && !unseen_writes()),
      as_written_only_(as_written),
      started_(Clock::now() -
               std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.spent))),
      limit_(kMargin * options.seconds),
      whole_(options.thorough.value_or(false)) {
  if (options.train_mode) modes_.push_back(Mode::train);
  if (options.eval_mode) modes_.insert(modes_.end(), {Mode::eval, Mode::no_grad});
}

VerifyResult Verifier::run() {
  state();
  if (b_.find_method(options_.method)) {  // else it is a difference in structure
    numbers();
    if (options_.measure && !raised_) measure();
  }
  r_.equal = r_.differences.empty();
  r_.verdict = verdict();
  r_.thorough = whole_;
  r_.first_step_seconds = step_;
  r_.seconds = elapsed();
  return std::move(r_);
}

void Verifier::say(const std::string& text) {
  const double parts = static_cast<double>(modes_.size()) + (options_.measure ? 1 : 0);
  if (options_.progress) options_.progress(text, std::min(1.0, (done_ + part_) / parts));
}

void Verifier::differs(const std::string& message) {
  auto text = ended(message);
  if (std::find(r_.differences.begin(), r_.differences.end(), text) == r_.differences.end())
    r_.differences.push_back(text);
}

void Verifier::note(const std::string& message) {
  auto text = ended(message);
  if (std::find(r_.notes.begin(), r_.notes.end(), text) == r_.notes.end()) r_.notes.push_back(text);
}

void Verifier::raises(const std::string& message) {
  if (!raised_) r_.differences.insert(r_.differences.begin(), ended(message));
  raised_ = true;
}

void Verifier::state() {
  say("comparing state and structure");
  r_.differences = structure_differences(a_, b_, &r_.state_dict_equal);
}

void Verifier::numbers() {
  for (auto* m : {&a_, &b_})
    if (auto dtype = autocast_of(*m, options_.method);
        !dtype.empty() && autocast_of(m == &a_ ? b_ : a_, options_.method).empty())
      note(fmt::format("The {} model's {} runs under autocast to {}; for the comparison the other's does too.",
                       m == &a_ ? "first" : "second", options_.method, dtype));
  optimised_ = code_[0].longest <= kMostOperators;
  const torch::jit::GraphOptimizerEnabledGuard guard(optimised_ && torch::jit::getGraphExecutorOptimize());
  if (!optimised_)
    note(
        fmt::format("TorchScript's optimiser was off, as it takes long for a block of {} operators; where the "
                    "random generator stands was not compared, as that depends on the optimiser.",
                    code_[0].longest));
  if (narrow_)
    note(
        fmt::format("The model casts to {} whatever its own dtype, so that in float64 too results may differ by that "
                    "dtype's rounding.",
                    dtype_of_epsilon(narrow_)));
  const FastDepthwise fast;
  for (auto mode : modes_) {
    calls(mode);
    ++done_;
    part_ = 0;
  }
  if (!ran_)
    throw Error(ErrorKind::input,
                fmt::format("The first model's {} fails with these inputs: {}", options_.method, first_error_));
  if (!r_.gradients_only_in_a.empty() || !r_.gradients_only_in_b.empty()) {
    auto& only = r_.gradients_only_in_a.empty() ? r_.gradients_only_in_b : r_.gradients_only_in_a;
    differs(fmt::format("Only the {} model gives a gradient to '{}'{}.",
                        r_.gradients_only_in_a.empty() ? "second" : "first", only[0],
                        only.size() > 1 ? fmt::format(" and {} more", only.size() - 1) : std::string()));
  }
}

std::string Verifier::verdict() const {
  if (!r_.equal)
    return r_.differences.size() == 1
               ? r_.differences[0]
               : fmt::format("{} ({} more differences.)", r_.differences[0], r_.differences.size() - 1);
  std::string text = "Equal: state and structure are the same";
  if (compared_in_f64_)
    text += fmt::format(", in float64 results differ by at most {:.1e}, and the median error ratio is at most {:.2f}",
                        f64_worst_, std::max({r_.ratio_output, r_.ratio_gradient, r_.ratio_buffer}));
  else
    text += ", and errors are within rounding or the first model's own spread, for it does not run in float64";
  bool own = std::any_of(r_.notes.begin(), r_.notes.end(),
                         [](auto& n) { return n.find("own spread between") != std::string::npos; });
  return text + (own && compared_in_f64_ ? " or within the first model's own spread." : ".");
}

// What a model's optimised code gives may be other than what its code says: TorchScript moves random draws past each
// other, and some of its derivatives are not PyTorch's. Where the second model gives the numbers of the code as it is
// written, it is right.
static void compare_as_written(VerifyResult& result, const std::function<VerifyResult()>& as_written) {
  if (result.equal || !result.state_dict_equal || !torch::jit::getGraphExecutorOptimize()) return;
  VerifyResult second;
  try {
    second = as_written();
  } catch (const Error&) {
    return;  // the first model runs optimised alone
  }
  if (!second.equal) return;
  second.seconds += result.seconds;
  second.measured = result.measured;
  for (int k : {0, 1}) {
    second.saved_bytes[k] = result.saved_bytes[k];
    second.peak_bytes[k] = result.peak_bytes[k];
    second.step_seconds[k] = result.step_seconds[k];
  }
  second.notes.push_back(
      "The first model gives other numbers once TorchScript has optimised it (its random draws are in another order, "
      "or "
      "a derivative is TorchScript's own); the second model gives those of the first as it is written, which it was "
      "compared with.");
  second.verdict += " The first model ran without TorchScript's optimiser, which changes its numbers.";
  result = std::move(second);
}

VerifyResult verify(const Module& a, const Module& b, const std::vector<IValue>& inputs, const VerifyOptions& options) {
  require_device(options.device);
  auto typed = check_inputs(a, options.method, inputs);
  if (!options.train_mode && !options.eval_mode) throw Error(ErrorKind::request, "There is no mode to verify in.");
  if (has_opaque(a) || has_opaque(b))
    throw Error(ErrorKind::input,
                "A program with an operator on functions (torch.cond) can't be run here; compare the models in Python, "
                "by torch.export.load(...).module().");
  VerifyResult result;
  const auto compare = [&](const VerifyOptions& how, bool as_written) {
    const auto started = Clock::now();
    try {
      return Verifier(a, b, typed, how, true, as_written).run();
    } catch (const OverwritesParameter&) {
      auto left = how;
      left.spent += seconds_since(started);
      return Verifier(a, b, typed, left, false, as_written).run();
    }
  };
  on_users_values("The models can't be compared on these inputs", [&] {
    result = compare(options, false);
    compare_as_written(result, [&] {
      auto again = options;
      again.measure = false;
      return compare(again, true);
    });
  });
  return result;
}

}  // namespace tsmem
