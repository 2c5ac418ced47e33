#include "rewriter/session/session_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "rewriter/error.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/plan/size.h"
#include "rewriter/text.h"
#include "tsmem/pattern.h"

namespace tsmem {

using c10::IValue;
using nlohmann::json;

Options::Options(const std::string& function, const std::string& text)
    : function_(function), given_(json::parse(text)) {}

void Options::refuse(const std::string& name) const {
  throw Error(ErrorKind::request,
              fmt::format("{}() can't take {} for its option '{}'.", function_, given_[name].dump(), name));
}

std::vector<std::string> Options::texts(const std::string& name) {
  if (given(name) && given_[name].is_string()) return {get<std::string>(name)};
  return get<std::vector<std::string>>(name);
}

std::string Options::size(const std::string& name) {
  if (given(name) && given_[name].is_number()) return get<json>(name).dump();
  return get<std::string>(name);
}

bool Options::given(const std::string& name) const {
  return given_.contains(name) && !given_[name].is_null() && given_[name] != false;
}

void Options::check_all_known() const {
  for (const auto& [name, value] : given_.items()) {
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    const std::string meant = nearest(name, known_);
    throw Error(ErrorKind::request, fmt::format("{}() has no option '{}'{}.", function_, name,
                                                meant.empty() ? "" : " (did you mean '" + meant + "'?)"));
  }
}

Run::Run(Options& o)
    : method(o.get<std::string>("method")),
      device(o.get<std::string>("device", "cpu")),
      seed(o.get<uint64_t>("seed")),
      specs(o.texts("input")) {
  require_device(device);
}

std::vector<IValue> Run::inputs(const IValue& examples, const std::string& on) const {
  if (!specs.empty() || examples.isNone()) return make_inputs(specs, "", seed, on);
  std::vector<IValue> all;
  for (const IValue& v : examples.toTupleRef().elements())
    all.push_back(map_tensors(v, [&](const at::Tensor& t) { return t.detach().to(c10::Device(on)); }));
  return all;
}

static std::string failure(const std::string& kind, const std::string& what, const std::string& about = "") {
  return json{{"error", what}, {"kind", kind}, {"about", about}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

// The sentence, with the option that helps as Python spells it.
static std::string with_advice(const Error& e) {
  std::string text = e.what();
  const std::string advice = e.option == "ops"        ? "load the library that defines it with torch.ops.load_library"
                             : e.option == "estimate" ? "leave estimate out"
                             : e.option == "link"     ? "link='25GB', for example"
                                                      : "";
  if (advice.empty()) return text;
  while (text.ends_with('.')) text.pop_back();
  return text + "; " + advice + ".";
}

std::string reported(const std::function<json()>& work) {
  try {
    return work().dump(-1, ' ', false, json::error_handler_t::replace);
  } catch (const Error& e) {
    const char* kinds[] = {"request", "input", "budget"};
    return failure(kinds[static_cast<int>(e.kind)], with_advice(e), e.option);
  } catch (const std::bad_alloc&) {
    return failure("input", "There is not enough memory for this model and these inputs.");
  } catch (const std::exception& e) {
    return failure("bug", sentence(e) + "; this is a bug in tsmem " TSMEM_VERSION);
  }
}

static Level level_of(Options& o) {
  const auto name = o.get<std::string>("level");
  for (const char* implies : {"budget", "fit", "batch_sizes", "estimate"})
    if (o.given(implies)) {
      if (!name.empty() && name != "plan")
        throw Error(ErrorKind::request, fmt::format("level='{}' and {} exclude each other.", name, implies));
      return Level::plan;
    }
  if (name.empty() || name == "regions") return Level::regions;
  if (name == "ops" || name == "plan") return name == "ops" ? Level::ops : Level::plan;
  throw Error(ErrorKind::request, fmt::format("level='{}' is not known; use ops, regions or plan.", name));
}

std::vector<Pattern> patterns(Options& o) {
  std::vector<Pattern> all;
  for (const std::string& file : o.texts("patterns")) try {
      for (Pattern& p : read_patterns(file)) all.push_back(std::move(p));
    } catch (const Error& e) {  // the file is an option's, and not the model's
      throw Error(ErrorKind::request, e.what(), e.option);
    }
  return all;
}

RewriteOptions rewriting(Options& o, const Run& run) {
  RewriteOptions r;
  r.level = level_of(o);
  r.patterns = patterns(o);
  r.only = o.texts("only");
  r.skip = o.texts("skip");
  r.module_globs = o.texts("module");
  r.checkpoint = o.texts("checkpoint");
  r.freeze = o.texts("freeze");
  r.train = o.texts("train");
  r.amp = o.get<std::string>("amp");
  r.method = run.method;
  if (r.level == Level::ops && !r.checkpoint.empty())
    throw Error(ErrorKind::request, "level='ops' and checkpoint exclude each other.");
  return r;
}

PlanOptions planning(Options& o, const Run& run) {
  PlanOptions how;
  how.method = run.method_or_forward();
  how.device = run.device;
  how.seed = run.seed;
  how.estimate = o.get<bool>("estimate");
  how.solver.seconds = o.get<double>("solve_seconds");
  how.offload = o.get<bool>("offload");
  if (const auto link = o.size("link"); !link.empty()) {
    if (!how.offload) throw Error(ErrorKind::request, "link is for offload: give offload=True too.");
    how.link = static_cast<double>(parse_size(link, "link", 0));
  }
  return how;
}

PlanRequest plan_request(Options& o, const Run& run) {
  return {o.size("budget"), o.size("fit"), o.get<std::vector<int64_t>>("batch_sizes"), o.get<int>("optimizer_states"),
          planning(o, run)};
}

void check_plan_request(const PlanRequest& request, Level level, bool has_inputs) {
  if (level == Level::plan && request.budget.empty() && request.fit.empty())
    throw Error(ErrorKind::request, "A plan needs a budget: budget='2GiB', or budget='40%' of the original's peak.");
  if (level == Level::plan && !has_inputs)
    throw Error(ErrorKind::request, "A plan needs an input: input='8x3x224x224', for example.");
  if (!request.fit.empty()) parse_size(request.fit, "fit", 0);
  if (!request.budget.empty()) parse_size(request.budget, "budget", 1 << 20);
}

}  // namespace tsmem
