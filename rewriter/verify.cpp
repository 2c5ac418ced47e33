#include "rewriter/verify.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "rewriter/error.h"
#include "rewriter/inputs.h"
#include "rewriter/memory.h"
#include "rewriter/rewrite.h"
#include "rewriter/view.h"

namespace tsmem {
namespace {

using c10::IValue;
using torch::jit::Module;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kF64Limit = 1e-9;   // A and B in float64
constexpr double kRatioLimit = 2.0;  // median of B's error over A's

// A copy that shares nothing with the module, its compiled code included: its first call is a first call.
Module fresh(const Module& m, const std::string& device) {
  std::stringstream bytes;
  m.save(bytes);
  return torch::jit::load(bytes, c10::Device(device));
}

// Casts every floating-point tensor of the module tree in place, also those in lists and dicts.
void to_double(const Module& m) {
  for (const auto& sub : m.modules())
    for (auto& v : sub._ivalue()->slots())
      if (!v.isObject() && !v.isCapsule())
        for (auto& t : floating_tensors(v))
          if (t.scalar_type() != at::kDouble) t.set_data(t.detach().to(at::kDouble));
}

at::Tensor channels_last(const at::Tensor& t) {
  return t.dim() == 4   ? t.contiguous(at::MemoryFormat::ChannelsLast)
         : t.dim() == 5 ? t.contiguous(at::MemoryFormat::ChannelsLast3d)
                        : t;
}

struct Named {
  std::string name;
  at::Tensor value;          // undefined: no gradient
  mutable double size = -1;  // its norm, where known
};

// What one call left behind.
struct Outcome {
  std::string error;  // of the call that raised
  std::vector<Named> outputs, gradients, buffers, inputs;
  std::vector<at::Tensor> random;  // generator states
};

struct Errors {
  double output = 0, gradient = 0, buffer = 0;
  double worst() const { return std::max({output, gradient, buffer}); }
};

// Dense and on the CPU; shares the memory of what is so already.
at::Tensor kept(const at::Tensor& t) {
  if (!t.defined()) return t;
  auto u = t.detach();
  if (!u.device().is_cpu()) u = u.cpu();
  if (u.layout() != at::kStrided) u = u.to_dense();
  if (u.is_complex()) u = at::view_as_real(u.resolve_conj());
  return u.is_quantized() ? u.dequantize() : u;
}

double norm_of(const at::Tensor& t) { return at::linalg_vector_norm(t, 2, {}, false, at::kDouble).item<double>(); }

at::Tensor finite_part(const at::Tensor& t) { return t.masked_fill(t.isfinite().logical_not(), 0); }

double size_of(const Named& v) {
  if (v.size < 0) {
    v.size = norm_of(v.value);
    if (!std::isfinite(v.size)) v.size = norm_of(finite_part(v.value));
  }
  return v.size;
}

// |u - v|; of whole numbers the part of |v| that differs.
double distance(const at::Tensor& u, const Named& named) {
  auto& v = named.value;
  if (u.sizes() != v.sizes() || u.is_floating_point() != v.is_floating_point()) return kInfinity;
  if (u.numel() == 0) return 0;
  if (!u.is_floating_point())
    return u.scalar_type() != v.scalar_type() ? kInfinity : u.ne(v).to(at::kDouble).mean().item<double>();
  bool direct = u.scalar_type() == v.scalar_type() && u.element_size() >= 4;
  auto minus = [&](const at::Tensor& x, const at::Tensor& y) {
    return norm_of(direct ? x - y : x.to(at::kDouble) - y.to(at::kDouble));
  };
  double d = minus(u, v);
  if (std::isfinite(d)) return d;
  // Where A is not finite B must be the same.
  auto odd = v.isfinite().logical_not();
  if (!u.isfinite().logical_not().equal(odd) ||
      !at::allclose(u.masked_select(odd).to(at::kDouble), v.masked_select(odd).to(at::kDouble), 0, 0,
                    /*equal_nan=*/true))
    return kInfinity;
  return minus(finite_part(u), finite_part(v));
}

double worst(const std::vector<Named>& us, const std::vector<Named>& vs) {
  if (us.size() != vs.size()) return kInfinity;
  auto real = [](const Named& v) { return v.value.defined() && v.value.is_floating_point() && v.value.numel(); };
  std::vector<double> sizes;
  for (auto& v : vs)
    if (real(v)) sizes.push_back(size_of(v));
  std::sort(sizes.begin(), sizes.end());
  double floor = std::max(sizes.empty() ? 0 : 1e-2 * sizes[sizes.size() / 2], 1e-30), most = 0;
  for (size_t i = 0; i < us.size(); ++i)
    if (us[i].value.defined() && vs[i].value.defined()) {
      double d = distance(us[i].value, vs[i]);
      most = std::max(most, d > 0 && real(vs[i]) ? d / std::max(size_of(vs[i]), floor) : d);
    }
  return most;
}

Errors errors(const Outcome& u, const Outcome& v) {
  return {worst(u.outputs, v.outputs), worst(u.gradients, v.gradients), worst(u.buffers, v.buffers)};
}

enum class Mode { train, eval, no_grad };
const char* name_of(Mode m) { return m == Mode::train ? "train" : m == Mode::eval ? "eval" : "no_grad"; }
std::string in_mode(Mode m) { return m == Mode::no_grad ? "without grad" : fmt::format("in {} mode", name_of(m)); }

struct Run {
  std::string method;
  c10::Device device;
  bool grad, input_grad;

  Outcome operator()(Module& m, const std::vector<IValue>& given, uint64_t seed) const {
    Outcome out;
    std::vector<IValue> inputs;
    for (auto& v : given) inputs.push_back(clone_value(v));
    auto leaves = floating_tensors(c10::ivalue::Tuple::create(inputs));
    std::vector<at::Generator> generators = {at::globalContext().defaultGenerator(c10::kCPU)};
    if (device.is_cuda()) generators.push_back(at::globalContext().defaultGenerator(device));
    for (auto& g : generators) {
      std::lock_guard lock(g.mutex());
      g.set_current_seed(seed);
    }
    for (const auto& p : m.parameters()) p.mutable_grad() = at::Tensor();
    at::AutoGradMode mode(grad);
    if (grad && input_grad)
      for (auto& t : leaves) t.requires_grad_();
    try {
      auto output = m.get_method(method)(inputs);
      auto floating = floating_tensors(output);
      std::vector<at::Tensor> roots, random;
      if (grad) {
        auto all = cotangents(floating, seed);
        for (size_t i = 0; i < floating.size(); ++i)
          if (floating[i].requires_grad()) {
            roots.push_back(floating[i]);
            random.push_back(all[i]);
          }
      }
      for (auto& t : all_tensors(output))
        out.outputs.push_back({fmt::format("output {}", out.outputs.size()), kept(t)});
      if (!roots.empty()) torch::autograd::backward(roots, random);
    } catch (const std::exception& e) {
      out.error = sentence(e);
      return out;
    }
    for (const auto& p : m.named_parameters()) out.gradients.push_back({p.name, kept(p.value.grad())});
    for (size_t i = 0; i < leaves.size(); ++i)
      if (grad && input_grad) out.gradients.push_back({fmt::format("input {}", i), kept(leaves[i].grad())});
    for (const auto& b : m.named_buffers())
      out.buffers.push_back({b.name, b.value.defined() ? kept(b.value).clone() : b.value});
    for (auto& t : all_tensors(c10::ivalue::Tuple::create(inputs)))
      out.inputs.push_back({fmt::format("input {}", out.inputs.size()), kept(t)});
    for (auto& g : generators) {
      std::lock_guard lock(g.mutex());
      out.random.push_back(g.get_state());
    }
    return out;
  }
};

// The inputs of the n-th call: those given, then with a little noise, which keeps their meaning (boxes stay boxes).
std::vector<IValue> vary(const std::vector<IValue>& inputs, int n, double size, uint64_t seed) {
  std::vector<IValue> out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    uint64_t count = 0;
    out.push_back(map_tensors(inputs[i], [&](const at::Tensor& t) {
      if (n == 0 || !t.is_floating_point()) return t.detach().clone();
      auto noise = cotangents({t}, seed + 7919 * static_cast<uint64_t>(n) + 104729 * i + count++)[0];
      return (t + t * noise * size).to(t.scalar_type());
    }));
  }
  return out;
}

std::vector<IValue> in_double(const std::vector<IValue>& inputs) {
  std::vector<IValue> out;
  for (auto& v : inputs) out.push_back(clone_value(v, at::kDouble));
  return out;
}

double epsilon_of(at::ScalarType t) {
  switch (t) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::ldexp(1.0, -10);
    case at::kBFloat16:
      return std::ldexp(1.0, -7);
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

// The coarsest floating-point type among parameters, inputs and outputs decides what rounding is.
double epsilon_of(const Module& m, const std::vector<IValue>& inputs) {
  double e = std::numeric_limits<double>::epsilon();
  bool any = false;
  auto add = [&](const at::Tensor& t) {
    if (!t.is_floating_point()) return;
    e = std::max(e, epsilon_of(t.scalar_type()));
    any = true;
  };
  for (const auto& p : m.parameters()) add(p);
  for (auto& t : floating_tensors(c10::ivalue::Tuple::create(inputs))) add(t);
  return any ? e : epsilon_of(at::kFloat);
}

// A model's own message, at the end of a sentence, may have no full stop.
std::string ended(const std::string& text) {
  return text.empty() || std::string(".!?").find(text.back()) != std::string::npos ? text : fmt::format("{}.", text);
}

// Whether a method draws random numbers, or may do so from a later call on.
bool calls_dropout(const Module& module, const std::string& method) {
  Scopes scopes;
  const View view = copy_graph(*toGraphFunction(module.get_method(method).function()).graph(), scopes,
                               [](const Scope*) { return true; });
  return std::any_of(view.places.begin(), view.places.end(), [](const auto& entry) {
    return std::string_view(entry.first->kind().toUnqualString()).find("dropout") != std::string_view::npos;
  });
}

class Verifier {
 public:
  Verifier(const Module& a, const Module& b, const std::vector<IValue>& inputs, const VerifyOptions& options)
      : a_(a),
        b_(b),
        inputs_(inputs),
        options_(options),
        epsilon_(epsilon_of(a, inputs)),
        has_dropout_(calls_dropout(a, options.method)) {}

  VerifyResult run() {
    state();
    for (auto* m : {&a_, &b_})
      if (auto dtype = autocast_of(*m, options_.method);
          !dtype.empty() && autocast_of(m == &a_ ? b_ : a_, options_.method).empty())
        note(fmt::format("The {} model's {} runs under autocast to {}; for the comparison the other's does too.",
                         m == &a_ ? "first" : "second", options_.method, dtype));
    std::vector<Mode> modes;
    if (options_.train_mode) modes.push_back(Mode::train);
    if (options_.eval_mode) modes.insert(modes.end(), {Mode::eval, Mode::no_grad});
    for (auto mode : modes) calls(mode);
    if (r_.calls.empty())
      throw Error(kBadInput,
                  fmt::format("The first model's {} fails with these inputs: {}", options_.method, first_error_));
    if (!r_.gradients_only_in_a.empty() || !r_.gradients_only_in_b.empty()) {
      auto& only = r_.gradients_only_in_a.empty() ? r_.gradients_only_in_b : r_.gradients_only_in_a;
      differs(fmt::format("Only the {} model gives a gradient to '{}'{}.",
                          r_.gradients_only_in_a.empty() ? "second" : "first", only[0],
                          only.size() > 1 ? fmt::format(" and {} more", only.size() - 1) : std::string()));
    }
    if (options_.measure) measure();
    r_.equal = r_.differences.empty();
    r_.verdict = verdict();
    return std::move(r_);
  }

 private:
  void say(const std::string& text) {
    if (options_.progress) options_.progress(text);
  }
  void differs(const std::string& message) {
    auto text = ended(message);
    if (std::find(r_.differences.begin(), r_.differences.end(), text) == r_.differences.end())
      r_.differences.push_back(text);
  }
  void note(const std::string& message) {
    auto text = ended(message);
    if (std::find(r_.notes.begin(), r_.notes.end(), text) == r_.notes.end()) r_.notes.push_back(text);
  }

  void state() {
    say("comparing state and structure");
    r_.state_dict_equal = state_differences(a_, b_).empty();
    r_.differences = structure_differences(a_, b_);
  }

  Module copy(const Module& m, Mode mode, bool f64) {
    auto c = fresh(m, options_.device);
    if (f64) to_double(c);
    // What runs under autocast is compared with the other under autocast too.
    const Module& other = &m == &a_ ? b_ : a_;
    if (auto dtype = autocast_of(other, options_.method); !dtype.empty() && autocast_of(m, options_.method).empty())
      write_autocast(c, options_.method, dtype);
    c.train(mode == Mode::train);
    return c;
  }

  Run runner(Mode mode, bool input_grad) const {
    return {options_.method, c10::Device(options_.device), mode != Mode::no_grad, input_grad};
  }

  // Runs A until its code is in its final form where it draws random numbers (TorchScript's own dropout draws otherwise
  // from the third call on), and puts its state back. Returns the message of an error.
  std::string settle(Module& a, const Run& run, const std::vector<IValue>& inputs) {
    StateGuard guard(a);
    for (int i = 0; i < 3; ++i) {
      auto out = run(a, inputs, options_.seed);
      if (!out.error.empty()) return out.error;
      if (!has_dropout_ && !draws(out, options_.seed)) break;
    }
    return "";
  }

  // Whether a call with this seed has drawn random numbers.
  bool draws(const Outcome& out, uint64_t seed) const {
    auto untouched = at::globalContext().defaultGenerator(c10::Device(options_.device)).clone();
    untouched.set_current_seed(seed);
    return !out.random.back().equal(untouched.get_state());
  }

  void calls(Mode mode) {
    auto a = copy(a_, mode, false), b = copy(b_, mode, false);
    auto run = runner(mode, true);
    say(fmt::format("{}: first calls", name_of(mode)));
    auto raised = settle(a, run, inputs_);
    if (!raised.empty() && mode != Mode::no_grad) {
      // Code that changes its input in place can't have an input that needs a gradient.
      auto without = runner(mode, false);
      auto again = settle(a, without, inputs_);
      if (again.empty()) {
        note(fmt::format("Gradients of the inputs were not compared {}: {}", in_mode(mode), raised));
        run = without;
      }
      raised = again;
    }
    if (!raised.empty()) {
      if (first_error_.empty()) first_error_ = raised;
      auto other = run(b, inputs_, options_.seed);
      if (other.error.empty())
        differs(fmt::format("The first model raises {} and the second does not: {}", in_mode(mode), raised));
      else
        note(fmt::format("Nothing was compared {}, where both models raise: {}", in_mode(mode), raised));
      return;
    }
    auto a64 = copy(a_, mode, true), b64 = copy(b_, mode, true);
    auto f64_error = settle(a64, run, in_double(inputs_));
    bool f64 = f64_error.empty();
    if (!f64)
      note(fmt::format("The first model does not run in float64 {}, so errors were compared with its own spread: {}",
                       in_mode(mode), f64_error));

    std::vector<double> ratios[3];
    double f64_worst = 0;
    Errors direct;
    int reported = std::max(options_.calls, 1),
        runs = mode == Mode::no_grad ? reported : std::max(reported, options_.seeds);
    for (int c = 0; c < runs; ++c) {
      say(fmt::format("{}: call {} of {}", name_of(mode), c + 1, runs));
      auto seed = options_.seed + static_cast<uint64_t>(c);
      auto inputs = vary(inputs_, c, std::ldexp(1.0, -10), options_.seed);
      auto ra = run(a, inputs, seed), rb = run(b, inputs, seed);
      if (!ra.error.empty())
        throw Error(kBadInput, fmt::format("The first model's {} fails on call {} {}: {}", options_.method, c + 1,
                                           in_mode(mode), ra.error));
      if (!rb.error.empty())
        return differs(fmt::format("The second model raises on call {} {}: {}", c + 1, in_mode(mode), rb.error));
      compare_sides(ra, rb, mode);
      const bool drawn_alike = same_random(ra, rb);
      if (!drawn_alike && !f64) {
        if (draws_by_rounding(mode, run))
          note(fmt::format(
              "How many random numbers are drawn depends on rounding {}: the first model's own draws differ too.",
              in_mode(mode)));
        else
          differs(fmt::format(
              "The random generator is in another state after call {} {}: the models draw random numbers differently.",
              c + 1, in_mode(mode)));
      }
      auto e = errors(rb, ra);
      direct = {std::max(direct.output, e.output), std::max(direct.gradient, e.gradient),
                std::max(direct.buffer, e.buffer)};
      CallResult call{name_of(mode), e.output, e.gradient, e.buffer, kNaN, {kNaN, kNaN}, {kNaN, kNaN}, {kNaN, kNaN}};
      if (f64) {
        auto wide = in_double(inputs);
        auto da = run(a64, wide, seed), db = run(b64, wide, seed);
        if (!da.error.empty())
          throw Error(kBadInput, fmt::format("The first model's {} fails in float64 on call {} {}: {}", options_.method,
                                             c + 1, in_mode(mode), da.error));
        if (!db.error.empty())
          return differs(fmt::format("The second model raises in float64 {}: {}", in_mode(mode), db.error));
        if (!same_random(da, db))
          differs(
              fmt::format("The random generator is in another state after call {} {} in float64: the models draw "
                          "random numbers differently.",
                          c + 1, in_mode(mode)));
        else if (!drawn_alike)  // a detector samples among the boxes it has found
          note(fmt::format("How many random numbers are drawn depends on rounding {}: in float64 both draw the same.",
                           in_mode(mode)));
        call.f64_error = errors(db, da).worst();
        f64_worst = std::max(f64_worst, call.f64_error);
        auto ea = errors(ra, da), eb = errors(rb, da);
        double pairs[3][2] = {{ea.output, eb.output}, {ea.gradient, eb.gradient}, {ea.buffer, eb.buffer}};
        for (int k : {0, 1}) {
          call.reference_output[k] = pairs[0][k];
          call.reference_gradient[k] = pairs[1][k];
          call.reference_buffer[k] = pairs[2][k];
        }
        for (int q = 0; q < 3; ++q) ratios[q].push_back(ratio(pairs[q][0], pairs[q][1]));
      }
      if (c < reported) r_.calls.push_back(call);
    }
    judge(mode, run, f64, f64_worst, direct, ratios);
  }

  // B's error over A's; where both are rounding it is 1.
  double ratio(double a, double b) const {
    double floor = 4 * epsilon_;
    if (std::isinf(a) && std::isinf(b)) return 1;
    return std::max(b, floor) / std::max(a, floor);
  }

  static bool same_random(const Outcome& a, const Outcome& b) {
    return std::equal(a.random.begin(), a.random.end(), b.random.begin(), b.random.end(),
                      [](auto& x, auto& y) { return x.equal(y); });
  }

  // What is no matter of degree.
  void compare_sides(const Outcome& a, const Outcome& b, Mode mode) {
    if (mode == Mode::no_grad && worst(b.inputs, a.inputs) > 16 * epsilon_)
      differs("The models change their inputs in place differently.");
    std::map<std::string, bool> in_a, in_b;
    for (auto& g : a.gradients) in_a[g.name] = g.value.defined();
    for (auto& g : b.gradients) in_b[g.name] = g.value.defined();
    auto only = [](std::map<std::string, bool>& x, std::map<std::string, bool>& y, std::vector<std::string>& out) {
      for (auto& [name, defined] : x)
        if (defined && !y[name] && std::find(out.begin(), out.end(), name) == out.end()) out.push_back(name);
    };
    only(in_a, in_b, r_.gradients_only_in_a);
    only(in_b, in_a, r_.gradients_only_in_b);
  }

  void judge(Mode mode, const Run& run, bool f64, double f64_worst, const Errors& direct,
             std::vector<double> (&ratios)[3]) {
    if (f64) {
      f64_worst_ = std::max(f64_worst_, f64_worst);
      compared_in_f64_ = true;
      if (f64_worst > kF64Limit) {
        auto [b, own] = spread(mode, run, true, true);
        if (b.worst() <= 2 * own.worst())
          note(
              fmt::format("In float64 {} the models differ by {:.1e}, within the first model's own spread between "
                          "layouts, thread counts and calls ({:.1e}).",
                          in_mode(mode), f64_worst, own.worst()));
        else
          differs(fmt::format("In float64 {} the models differ by {:.1e}, more than {:.0e}.", in_mode(mode), f64_worst,
                              kF64Limit));
      }
      double medians[3] = {median(ratios[0]), median(ratios[1]), median(ratios[2])};
      r_.ratio_output = std::max(r_.ratio_output, medians[0]);
      r_.ratio_gradient = std::max(r_.ratio_gradient, medians[1]);
      r_.ratio_buffer = std::max(r_.ratio_buffer, medians[2]);
      if (*std::max_element(medians, medians + 3) <= kRatioLimit) return;
    } else {
      double limit = 16 * epsilon_;
      if (direct.worst() <= limit) return;
    }
    auto [b, own] = spread(mode, run, f64, false);
    double floor = 4 * epsilon_;
    const std::tuple<const char*, double, double> all[] = {
        {"outputs", b.output, own.output}, {"gradients", b.gradient, own.gradient}, {"buffers", b.buffer, own.buffer}};
    for (auto& [what, error, mine] : all) {
      double limit = 2 * std::max(mine, floor);
      if (error > limit)
        differs(
            fmt::format("The second model's {} are off by {:.1e} {}, the first model's own by at most {:.1e} between "
                        "layouts, thread counts and calls.",
                        what, error, in_mode(mode), mine));
    }
    if (b.output <= 2 * std::max(own.output, floor) && b.gradient <= 2 * std::max(own.gradient, floor) &&
        b.buffer <= 2 * std::max(own.buffer, floor))
      note(
          fmt::format("Errors {} were accepted because they are within the first model's own spread between layouts, "
                      "thread counts and calls.",
                      in_mode(mode)));
  }

  // Whether the first model draws otherwise with inputs that differ in their last digit, or with another thread count:
  // as a detector that samples among the boxes it has found.
  bool draws_by_rounding(Mode mode, const Run& run) {
    if (draws_by_rounding_.count(mode)) return draws_by_rounding_[mode];
    auto a = copy(a_, mode, false);
    settle(a, run, inputs_);
    const auto one = [&](const std::vector<IValue>& inputs, uint64_t seed) {
      StateGuard guard(a);
      return run(a, inputs, seed);
    };
    bool& found = draws_by_rounding_[mode];
    for (int s = 0; s < std::max(options_.seeds, 5) && !found; ++s) {
      say(fmt::format("{}: own draws, seed {}", name_of(mode), s + 1));
      const auto seed = options_.seed + static_cast<uint64_t>(s);
      const auto inputs = vary(inputs_, s, std::ldexp(1.0, -10), options_.seed);
      const auto ref = one(inputs, seed);
      if (!ref.error.empty()) continue;
      const auto differs = [&](const Outcome& o) { return o.error.empty() && !same_random(o, ref); };
      for (uint64_t v = 1; v <= 2 && !found; ++v) found = differs(one(vary(inputs, 1, epsilon_, seed + v), seed));
      const int threads = at::get_num_threads();
      at::set_num_threads(threads == 1 ? 2 : 1);
      found = found || differs(one(inputs, seed));
      at::set_num_threads(threads);
    }
    return found;
  }

  // Medians over the seeds of B's error and of the worst error among A's variants: other thread count, other memory
  // format, inputs changed in their last digit. Against A in float64 (or A itself); `wide`: all in float64.
  std::pair<Errors, Errors> spread(Mode mode, const Run& run, bool f64, bool wide) {
    auto reference = copy(a_, mode, f64), a = copy(a_, mode, wide), b = copy(b_, mode, wide),
         last = copy(a_, mode, wide);
    for (const auto& m : last.modules())
      for (auto& v : m._ivalue()->slots())
        if (v.isTensor() && v.toTensor().defined()) v.toTensor().set_data(channels_last(v.toTensor().detach()));
    settle(reference, run, f64 ? in_double(inputs_) : inputs_);
    for (auto* m : {&a, &last}) settle(*m, run, wide ? in_double(inputs_) : inputs_);
    double e = wide ? std::numeric_limits<double>::epsilon() : epsilon_;
    std::vector<double> mine[3], theirs[3];
    for (int s = 0; s < std::max(options_.seeds, 1); ++s) {
      say(fmt::format("{}: own spread, seed {} of {}", name_of(mode), s + 1, options_.seeds));
      auto seed = options_.seed + static_cast<uint64_t>(s);
      auto inputs = vary(inputs_, s, std::ldexp(1.0, -10), options_.seed);
      auto in = [&](const std::vector<IValue>& v, bool d) { return d ? in_double(v) : v; };
      auto one = [&](Module& m, const std::vector<IValue>& v) {
        StateGuard guard(m);
        return run(m, v, seed);
      };
      auto ref = one(reference, in(inputs, f64));
      auto other = errors(one(b, in(inputs, wide)), ref);
      Errors most;
      auto add = [&](const Outcome& o) {
        if (!o.error.empty()) return;  // a variant that does not run (a view on channels_last) says nothing
        auto x = errors(o, ref);
        most = {std::max(most.output, x.output), std::max(most.gradient, x.gradient), std::max(most.buffer, x.buffer)};
      };
      add(one(a, in(inputs, wide)));
      {
        // TorchScript differentiates by itself from the second call on, with other constants than the kernels have (a
        // sixth in float32 in that of hardsigmoid: 3e-8). Not where the first call may draw other random numbers: that
        // would excuse anything.
        auto first = copy(a_, mode, wide);
        auto out = run(first, in(inputs, wide), seed);
        if (out.error.empty() && (wide ? errors(out, ref).worst() < 1e-6 : !draws(out, seed))) add(out);
      }
      int threads = at::get_num_threads();
      at::set_num_threads(threads == 1 ? 2 : 1);
      add(one(a, in(inputs, wide)));
      at::set_num_threads(threads);
      std::vector<IValue> formatted;
      for (auto& v : in(inputs, wide)) formatted.push_back(map_tensors(v, channels_last));
      add(one(last, formatted));
      add(one(a, vary(in(inputs, wide), 1, e, seed + 1)));
      double m[3] = {most.output, most.gradient, most.buffer}, t[3] = {other.output, other.gradient, other.buffer};
      for (int q = 0; q < 3; ++q) {
        mine[q].push_back(m[q]);
        theirs[q].push_back(t[q]);
      }
    }
    return {{median(theirs[0]), median(theirs[1]), median(theirs[2])},
            {median(mine[0]), median(mine[1]), median(mine[2])}};
  }

  void measure() {
    try {
      Module modules[2] = {fresh(a_, options_.device), fresh(b_, options_.device)};
      ProfileOptions o;
      o.method = options_.method;
      o.device = options_.device;
      o.train = options_.train_mode;
      o.seed = options_.seed;
      o.timing = false;
      bool trains = false;
      for (const auto& p : modules[0].parameters()) trains |= p.requires_grad();
      o.input_grad = !trains;
      for (int k : {0, 1}) {
        say(fmt::format("memory of the {} model", k ? "second" : "first"));
        auto p = profile(modules[k], inputs_, o);
        r_.saved_bytes[k] = p.saved_bytes;
        r_.peak_bytes[k] = p.peak_bytes;
      }
      say("timing");
      // In turn, so that whatever else the machine does meets both.
      TrainingStep first(modules[0], inputs_, o), second(modules[1], inputs_, o);
      std::vector<double> seconds[2];
      for (int i = 0; i <= o.steps; ++i)
        for (int k : {0, 1}) {
          auto& step = k ? second : first;
          step.run();
          if (i) seconds[k].push_back(step.forward_seconds + step.backward_seconds);
        }
      for (int k : {0, 1}) r_.step_seconds[k] = median(seconds[k]);
      r_.measured = true;
    } catch (const Error& e) {
      note(fmt::format("Memory and time were not measured: {}", e.what()));
    }
  }

  std::string verdict() const {
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

  const Module &a_, &b_;
  const std::vector<IValue>& inputs_;
  const VerifyOptions& options_;
  const double epsilon_;
  const bool has_dropout_;
  double f64_worst_ = 0;
  bool compared_in_f64_ = false;
  std::map<Mode, bool> draws_by_rounding_;
  std::string first_error_;
  VerifyResult r_;
};

nlohmann::json number(double x) { return std::isfinite(x) ? nlohmann::json(x) : nlohmann::json(nullptr); }

}  // namespace

VerifyResult verify(const Module& a, const Module& b, const std::vector<IValue>& inputs, const VerifyOptions& options) {
  require_device(options.device);
  auto typed = check_inputs(a, options.method, inputs);
  if (!b.find_method(options.method))
    throw Error(kUsage, fmt::format("The second model has no method '{}'.", options.method));
  if (!options.train_mode && !options.eval_mode) throw Error(kUsage, "There is no mode to verify in.");
  return Verifier(a, b, typed, options).run();
}

nlohmann::json to_json(const VerifyResult& r) {
  auto calls = nlohmann::json::array();
  auto pair = [](const double(&p)[2]) { return nlohmann::json{number(p[0]), number(p[1])}; };
  for (auto& c : r.calls)
    calls.push_back({{"mode", c.mode},
                     {"output_error", number(c.output_error)},
                     {"gradient_error", number(c.gradient_error)},
                     {"buffer_error", number(c.buffer_error)},
                     {"f64_error", number(c.f64_error)},
                     {"reference_errors",
                      {{"output", pair(c.reference_output)},
                       {"gradient", pair(c.reference_gradient)},
                       {"buffer", pair(c.reference_buffer)}}}});
  return {{"equal", r.equal},
          {"verdict", r.verdict},
          {"differences", r.differences},
          {"notes", r.notes},
          {"calls", calls},
          {"state_dict_equal", r.state_dict_equal},
          {"gradients_only_in", {{"a", r.gradients_only_in_a}, {"b", r.gradients_only_in_b}}},
          {"median_ratios",
           {{"output", number(r.ratio_output)},
            {"gradient", number(r.ratio_gradient)},
            {"buffer", number(r.ratio_buffer)}}},
          {"saved_bytes", {r.saved_bytes[0], r.saved_bytes[1]}},
          {"peak_bytes", {r.peak_bytes[0], r.peak_bytes[1]}},
          {"step_seconds", {r.step_seconds[0], r.step_seconds[1]}}};
}

}  // namespace tsmem
