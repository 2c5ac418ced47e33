#include "tsmem/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "rewriter/file/in_memory.h"
#include "rewriter/file/memory_file.h"
#include "rewriter/file/model_file.h"
#include "rewriter/graph/exported_program.h"
#include "rewriter/graph/tensor_values.h"
#include "rewriter/measure/as_it_runs.h"
#include "rewriter/measure/estimate.h"
#include "rewriter/measure/freed_memory.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/measure/link.h"
#include "rewriter/measure/saved_tensors_of_step.h"
#include "rewriter/plan/fit.h"
#include "rewriter/plan/milp.h"
#include "rewriter/plan/planner.h"
#include "rewriter/plan/size.h"
#include "rewriter/rewrite/rewrite.h"
#include "rewriter/session/report_json.h"
#include "rewriter/stays/stays.h"
#include "rewriter/text.h"

namespace tsmem {
namespace {

using torch::jit::Module;

bool matches_any(const std::vector<std::string>& globs, const std::string& name) {
  return std::any_of(globs.begin(), globs.end(), [&](const auto& glob) { return glob_covers(glob, name); });
}

// Gives the original the flags that freeze and train asked for: they are no difference.
void take_flags(const Module& original, const Module& rewritten, const RewriteOptions& options) {
  std::map<std::string, bool> flags;
  for (const auto& p : rewritten.named_parameters()) flags[p.name] = p.value.requires_grad();
  for (const auto& p : original.named_parameters())
    if ((matches_any(options.freeze, p.name) || matches_any(options.train, p.name)) && flags.count(p.name))
      p.value.set_requires_grad(flags[p.name]);
}

// The options as they are for such a file. Throws Error(ErrorKind::request) for what TorchScript alone can take.
RewriteOptions options_for(const ModelFile& file, RewriteOptions options) {
  if (!file.exported) return options;
  const auto refuse = [&](const char* option, const char* instead) {
    throw Error(ErrorKind::request,
                fmt::format("A program of torch.export can't be rewritten with {}: {}.", option, instead));
  };
  if (!options.amp.empty())
    refuse("amp", "put torch.autocast into the model's forward and export it again, or train the program under it");
  if (!options.checkpoint.empty()) refuse("checkpoint", "import it first (tsmem import), or use a budget");
  options.runs_eagerly = true;
  return options;
}

// What a measurement that nothing depends on throws is no matter.
void measured(const std::function<void()>& measurement) {
  try {
    measurement();
  } catch (const std::exception&) {
  }
}

OriginalStep original_step(const Planner& planner) {
  const auto original = planner.original();
  return {original.peak_bytes, original.kept_bytes, original.seconds};
}

}  // namespace

struct Session::Impl {
  std::string path;              // empty: of a module in memory
  std::optional<Module> source;  // that module
  ModelFile file;                // what is rewritten
  RewriteOptions options;
  std::optional<Module> original;  // that has run, or may: on `original_device`
  std::string original_device;
  std::unique_ptr<PendingModel> pending;
  std::optional<SimulatedLink> link;  // of a plan that offloads, on the CPU: also while its numbers are verified

  Module again(const std::string& device) const {
    return source ? copy_in_memory(*source, device) : load_model(path, device).module;
  }
  // The model as it was given.
  Module& original_on(const std::string& device) {
    if (!original || original_device != device) {
      original.reset();
      original = again(device);
      original_device = device;
    }
    return *original;
  }
  // What is to be compared with it.
  Module result_on(const std::string& device) const {
    if (pending) return load_model(pending->temporary(), device).module;
    if (!file.exported) return copy_in_memory(file.module, device);
    const MemoryFile written(bytes_of(file));  // what is compared is what the archive's graph says
    return load_model(written.path(), device).module;
  }
  void describe(const RewriteReport& report, const ChosenPlan* plan) {
    file.extra_files["tsmem.json"] =
        about_json(options, report, plan).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }

  void measure_saved(Module original, Module result, const std::vector<c10::IValue>& inputs, const std::string& device,
                     RewriteReport& report) const {
    StepOptions how;
    how.method = options.method.empty() ? "forward" : options.method;
    how.device = device;
    how.input_grad = !trains(result);
    const auto sum = [](const std::vector<SavedTensor>& tensors) {
      int64_t bytes = 0;
      for (const SavedTensor& t : tensors) bytes += t.bytes.value_or(0);
      return bytes;
    };
    tsmem::restore(original);
    take_flags(original, result, options);
    const int64_t before = sum(saved_tensors_of_step(original, inputs, how));
    const auto left = saved_tensors_of_step(result, inputs, how);
    report.saved.original_bytes = before;
    report.saved.bytes = sum(left);
    report.saved.stays = stays_of(left, options, report);
  }

  // A program of torch.export says with what shapes it runs.
  void measure_exported(RewriteReport& report) const {
    const auto arguments = arguments_on_meta(file.exported->program.at("graph_module"));
    if (!arguments) return;
    const std::vector<c10::IValue> inputs(arguments->begin(), arguments->end());
    const auto on_meta = estimate_on_meta();
    measure_saved(again("meta"), copy_in_memory(file.module, "meta"), inputs, "meta", report);
  }

  // A module that has run can't be rewritten any more, and the file's stays on the device that its tensors name: so
  // copies run.
  struct Planned {
    RewriteReport report;
    std::unique_ptr<Planner> planner;
  };
  Planned planned(const std::vector<c10::IValue>& inputs, PlanOptions how) {
    how.device = how.estimate ? "meta" : how.device;
    if (how.offload && how.link <= 0) how.link = measured_link(how.device);
    if (how.offload && (how.device == "cpu" || how.device == "meta")) link.emplace(how.link);
    options.level = Level::plan;
    tsmem::restore(file.module);
    Planned p{tsmem::rewrite(file.module, options), nullptr};
    Module running = file.module;
    auto sites = p.report.sites;
    if (how.device != "cpu") {
      running = again(how.device);
      tsmem::restore(running);
      sites = tsmem::rewrite(running, options).sites;
    }
    Module before = original_on(how.device);
    if (is_rewritten(before)) {
      before = again(how.device);
      tsmem::restore(before);
    }
    p.planner = std::make_unique<Planner>(before, running, std::move(sites), inputs, how);
    return p;
  }
};

Session::Session(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  impl_->file = load_model(path);
}

Session::Session(const Module& module) : impl_(std::make_unique<Impl>()) {
  impl_->source = module;
  impl_->file.module = copy_in_memory(module);
}

Session::Session(const Module& module, Module working) : impl_(std::make_unique<Impl>()) {
  impl_->source = module;
  impl_->file.module = std::move(working);
}

Session::Session(Session&&) noexcept = default;
Session::~Session() = default;

const Module& Session::module() const { return impl_->file.module; }

RewriteReport Session::rewrite(const RewriteOptions& options, bool dry_run) {
  impl_->options = options_for(impl_->file, options);
  tsmem::restore(impl_->file.module);  // a rewrite starts from the originals, a dry run too
  RewriteReport report = tsmem::rewrite(impl_->file.module, impl_->options, dry_run);
  impl_->describe(report, nullptr);
  if (impl_->file.exported && !dry_run) measured([&] { impl_->measure_exported(report); });
  return report;
}

void Session::measure_saved(RewriteReport& report, const std::vector<c10::IValue>& inputs, const std::string& device) {
  const auto on_meta = device == "meta" ? estimate_on_meta() : nullptr;
  measured([&] {
    const auto& options = impl_->options;
    Module result = impl_->result_on(device);
    impl_->measure_saved(impl_->again(device), result,
                         check_inputs(result, options.method.empty() ? "forward" : options.method, inputs), device,
                         report);
  });
}

PlannedRewrite Session::plan(RewriteOptions options, const std::vector<c10::IValue>& inputs,
                             const PlanRequest& request) {
  const KeepFreedMemory keep;
  impl_->options = options_for(impl_->file, std::move(options));
  const auto guard = as_it_runs(impl_->options.runs_eagerly);
  auto [report, planner] = impl_->planned(inputs, request.how);
  ChosenPlan plan;
  plan.original = original_step(*planner);
  if (request.budget.ends_with('%') && plan.original.peak_bytes == 0)
    throw Error(
        ErrorKind::input,
        "PyTorch's allocator reports no memory for a training step of the original, so a budget can't be a part "
        "of it: give a size, such as 2GiB.");
  plan.point = request.budget.empty() ? planner->smallest()
                                      : planner->plan(parse_size(request.budget, "budget", plan.original.peak_bytes));
  for (size_t s = 0; s < report.sites.size(); ++s)
    if (const Site& site = report.sites[s]; plan.point.choice[s] == Fate::offload)
      plan.offloaded.push_back({site.module, site.op});
    else if (site.expensive && plan.point.choice[s] == Fate::recompute)
      plan.run_again.push_back({site.module, site.op});
  plan.solver = solver_name();
  plan.solve_seconds = planner->solve_seconds();
  if (!request.fit.empty() || !request.batch_sizes.empty())
    plan.batches = batch_memory(*planner, plan.point, impl_->file.module, inputs, request);
  planner.reset();  // puts the module's state back
  set_choice(impl_->file.module, report.sites, plan.point.choice);
  impl_->describe(report, &plan);
  return {std::move(report), std::move(plan)};
}

PlanFront Session::front(RewriteOptions options, const std::vector<c10::IValue>& inputs, const PlanOptions& how,
                         int count) {
  const KeepFreedMemory keep;
  impl_->options = options_for(impl_->file, std::move(options));
  const auto guard = as_it_runs(impl_->options.runs_eagerly);
  const auto planner = impl_->planned(inputs, how).planner;
  const auto original = original_step(*planner);
  PlanFront front{planner->front(original.peak_bytes, count), original, solver_name(), 0, 0};
  front.solve_seconds = planner->solve_seconds();
  front.solves = planner->solves();
  return front;
}

void Session::restore() {
  if (impl_->file.exported)
    throw Error(ErrorKind::input, "'" + impl_->path +
                                      "' is a program of torch.export, which keeps no originals when it is rewritten; "
                                      "use the file that it was made from.");
  if (!tsmem::restore(impl_->file.module))
    throw Error(ErrorKind::input, (impl_->path.empty() ? "The module" : "'" + impl_->path + "'") +
                                      " has nothing to restore: tsmem did not write it.");
  impl_->file.extra_files.erase("tsmem.json");
}

void Session::write(const std::string& path, bool replace) {
  impl_->pending = std::make_unique<PendingModel>(impl_->file, path, replace);
  impl_->file.module = Module();  // its weights are not needed beside the two that are compared
}

std::string Session::bytes() const { return bytes_of(impl_->file); }

void Session::commit() { impl_->pending->commit(); }

std::vector<std::string> Session::structure_differences(const std::string& device) {
  Module& original = impl_->original_on(device);
  const Module result = impl_->result_on(device);
  take_flags(original, result, impl_->options);
  return tsmem::structure_differences(original, result);
}

VerifyResult Session::verify(const std::vector<c10::IValue>& inputs, const VerifyOptions& given) {
  const KeepFreedMemory keep;
  VerifyOptions options = given;
  if (impl_->file.exported) options.eval_mode = false;  // a program has one mode: that in which it was exported
  const auto guard = as_it_runs(impl_->file.exported != nullptr);
  Module& original = impl_->original_on(options.device);
  const Module result = impl_->result_on(options.device);
  take_flags(original, result, impl_->options);
  return tsmem::verify(original, result, check_inputs(original, options.method, inputs), options);
}

}  // namespace tsmem
