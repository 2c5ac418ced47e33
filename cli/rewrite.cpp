// tsmem rewrite: load, rewrite, write beside the output, check what was written, rename.
#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli.h"
#include "freed_memory.h"
#include "patterns/pattern.h"
#include "planning.h"
#include "rewriter/error.h"
#include "rewriter/inputs.h"
#include "rewriter/model_file.h"
#include "rewriter/plan/milp.h"
#include "rewriter/rewrite.h"
#include "rewriter/text.h"
#include "rewriter/verify/verify.h"
#include "run_options.h"

namespace tsmem::cli {
namespace {

using nlohmann::json;

struct Options {
  std::string model, output, level = "regions", budget, inputs_file, device = "cpu", batch_sizes, fit, json_file;
  std::vector<std::string> inputs;
  int optimizer_states = 0;
  PlanLimits limits;
  RewriteOptions rewrite;
  bool undo = false, explain = false, dry_run = false, force = false, no_verify = false, thorough = false;
};

std::vector<int64_t> parse_batch_sizes(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const bool number = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    if (!number || std::stoll(part) == 0)
      throw Error(kUsage, "--batch-sizes '" + text + "' is no list of batch sizes: write 32,64,128.");
    sizes.push_back(std::stoll(part));
  }
  if (sizes.empty()) throw Error(kUsage, "--batch-sizes '' is no list of batch sizes: write 32,64,128.");
  return sizes;
}

// Sets the level to plan where another option implies it.
void settle_level(Options& o, const CLI::App& app) {
  const auto given = [&](const char* name) { return app.get_option(name)->count() > 0; };
  if (given("--level") && o.level == "ops" && given("--checkpoint"))
    throw Error(kUsage, "--level ops and --checkpoint exclude each other.");
  for (auto name : {"--budget", "--fit", "--batch-sizes", "--estimate"}) {
    if (!given(name)) continue;
    if (given("--level") && o.level != "plan")
      throw Error(kUsage, fmt::format("--level {} and {} exclude each other.", o.level, name));
    o.level = "plan";
  }
  for (auto name : {"--optimizer-states", "--solve-seconds"})
    if (given(name) && o.level != "plan") throw Error(kUsage, fmt::format("{} is for plans: give --budget too.", name));
  if (given("--optimizer-states") && !given("--fit") && !given("--batch-sizes"))
    throw Error(kUsage, "--optimizer-states is for --fit and --batch-sizes, and neither is given.");
  // Before the work, not after it.
  if (given("--budget")) parse_size(o.budget, "--budget", 1 << 20);
  if (given("--fit")) parse_size(o.fit, "--fit", 0);
  if (given("--batch-sizes")) parse_batch_sizes(o.batch_sizes);
  if (o.thorough && (o.no_verify || (!given("--input") && !given("--inputs"))))
    throw Error(kUsage, "--thorough says how to compare the numbers: give --input too, and no --no-verify.");
  if (o.level != "plan") return;
  if (!given("--budget") && !given("--fit"))
    throw Error(kUsage, "A plan needs a budget: --budget 2GiB, or --budget 40% of the original's peak.");
  o.limits.check(given("--input") || given("--inputs"), o.rewrite.amp);
}

void refuse_conflicts(const Options& o, const CLI::App& app) {
  if (!o.undo) return;
  for (auto name : {"--only", "--skip", "--module", "--checkpoint", "--freeze", "--train", "--method", "--explain",
                    "--amp", "--budget", "--fit", "--batch-sizes", "--estimate"})
    if (app.get_option(name)->count() > 0)
      throw Error(kUsage, std::string("--restore and ") + name + " exclude each other.");
}

void check_files(const Options& o) {
  check_report(o.json_file);
  if (o.output.empty()) {
    if (!o.dry_run) throw Error(kUsage, "Name the output with -o OUT.pt, or use --dry-run.");
  } else {
    if (same_file(o.model, o.output))
      throw Error(kUsage,
                  "The output '" + o.output + "' is the input, which is never overwritten; choose another name.");
    if (!o.dry_run) check_output(o.output, o.force);
  }
  for (auto& file : {o.model, o.output})
    if (!o.json_file.empty() && !file.empty() && (o.json_file == file || same_file(o.json_file, file)))
      throw Error(kUsage, "--json '" + o.json_file + "' is the model's own name; choose another.");
}

json options_json(const Options& o) {
  auto& r = o.rewrite;
  return {{"level", o.level},           {"only", r.only},     {"skip", r.skip},   {"module", r.module_globs},
          {"checkpoint", r.checkpoint}, {"freeze", r.freeze}, {"train", r.train}, {"amp", r.amp},
          {"method", r.method}};
}

json matches_json(const RewriteReport& report) {
  json matches = json::array();
  for (auto& m : report.matches)
    matches.push_back(
        {{"pattern", m.pattern}, {"module", m.module}, {"method", m.method}, {"nodes", m.nodes}, {"op", m.op}});
  return matches;
}

json regions_json(const RewriteReport& report) {
  json regions = json::array();
  for (auto& r : report.regions)
    regions.push_back({{"module", r.module}, {"method", r.method}, {"kept", r.kept}, {"recomputed", r.recomputed}});
  return regions;
}

json report_json(const Options& o, const RewriteReport& report, const json& predicted) {
  json refused = json::array();
  for (auto& r : report.refused)
    refused.push_back({{"pattern", r.pattern}, {"module", r.module}, {"reason", r.reason}});
  return {{"tool", "tsmem"},
          {"version", TSMEM_VERSION},
          {"input", o.model},
          {"output", o.dry_run ? json() : json(o.output)},
          {"matches", matches_json(report)},
          {"refused", refused},
          {"regions", regions_json(report)},
          {"predicted", predicted}};
}

// "before: a, b; after: a (in some cases: c)" -> "a"; 'tsmem patterns' has the whole.
std::string kept_after(const Pattern& pattern) {
  auto at = pattern.keeps.find("after: ");
  auto text = at == std::string::npos ? pattern.keeps : pattern.keeps.substr(at + 7);
  return text.substr(0, text.find(" ("));
}

void print_matches(const RewriteReport& report, bool verbose) {
  std::map<std::string, size_t> counts;
  for (auto& match : report.matches) ++counts[match.pattern];
  std::vector<std::vector<std::string>> rows = {{"pattern", "matches", "kept for backward"}};
  for (auto& pattern : all_patterns())
    if (counts.count(pattern.name))
      rows.push_back({pattern.name, std::to_string(counts[pattern.name]), kept_after(pattern)});
  print(table(rows));
  if (!verbose) return;
  print("\n");
  rows = {{"module", "method", "pattern", "operators", "now"}};
  for (auto& m : report.matches) {
    std::string nodes;
    for (auto& node : m.nodes) nodes += (nodes.empty() ? "" : ", ") + node;
    rows.push_back({m.module.empty() ? "(model)" : m.module, m.method, m.pattern, nodes, m.op});
  }
  print(table(rows));
}

// Refusals by pattern and reason, the modules of each behind it.
void print_refusals(const RewriteReport& report, bool color) {
  if (report.refused.empty()) return print("Nothing almost matched.\n");
  print("Almost matched:\n");
  std::map<std::string, std::map<std::string, std::vector<std::string>>> groups;
  for (auto& r : report.refused) groups[r.pattern][r.reason].push_back(r.module.empty() ? "(model)" : r.module);
  for (auto& [pattern, reasons] : groups) {
    print("  " + paint(pattern, Color::bold, color) + "\n");
    for (auto& [reason, modules] : reasons) {
      std::string line = "    ";
      for (size_t i = 0; i < modules.size() && i < 4; ++i) line += (i ? ", " : "") + modules[i];
      if (modules.size() > 4) line += fmt::format(" and {} more", modules.size() - 4);
      print(line + ": " + reason + "\n");
    }
  }
}

bool matches_any(const std::vector<std::string>& globs, const std::string& name) {
  return std::any_of(globs.begin(), globs.end(), [&](auto& glob) { return glob_covers(glob, name); });
}

// The original with the flags that --freeze and --train asked for: they are no difference.
void take_flags(torch::jit::Module& original, const torch::jit::Module& rewritten, const RewriteOptions& options) {
  std::map<std::string, bool> flags;
  for (const auto& p : rewritten.named_parameters()) flags[p.name] = p.value.requires_grad();
  for (const auto& p : original.named_parameters())
    if ((matches_any(options.freeze, p.name) || matches_any(options.train, p.name)) && flags.count(p.name))
      p.value.set_requires_grad(flags[p.name]);
}

// Compares what was written with the original. Prints what differs and returns false where it isn't the same.
bool check_written(const Options& o, const Common& common, const std::string& written) {
  auto original = load_model(o.model, o.device).module, rewritten = load_model(written, o.device).module;
  take_flags(original, rewritten, o.rewrite);
  if (auto differences = structure_differences(original, rewritten); !differences.empty())
    throw std::runtime_error("The rewritten model differs from the original: " + differences[0]);
  if ((o.inputs.empty() && o.inputs_file.empty()) || o.limits.estimate || o.no_verify) return true;
  keep_freed_memory();
  VerifyOptions options;
  if (!o.rewrite.method.empty()) options.method = o.rewrite.method;
  options.device = o.device;
  options.seed = common.seed;
  options.spent = seconds_since(common.started);
  options.measure = false;
  if (o.thorough) options.thorough = true;
  const Progress progress(common);
  options.progress = [&](const std::string& text, double done) { progress("verifying: " + text, done); };
  auto inputs = check_inputs(original, options.method, make_inputs(o.inputs, o.inputs_file, common.seed, o.device));
  auto result = verify(original, rewritten, inputs, options);
  progress.clear();
  if (!result.equal) {
    fmt::print(stderr, "tsmem: The rewritten model failed its verification, so no file was written: {}\n",
               result.verdict);
    return false;
  }
  if (!common.quiet && o.json_file != "-") print("Verified: " + result.verdict + "\n" + compared_text(result) + "\n");
  return true;
}

// Bytes that the machine has to give.
int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;)
    if (int64_t kib = 0; word == "MemAvailable:" && file >> kib) return kib * 1024;
  return 0;
}

// Rewrites file.module by a plan, and says in `predicted` what it needs.
RewriteReport plan_file(const Options& o, const Common& common, ModelFile& file, json& predicted) {
  const auto method = o.rewrite.method.empty() ? std::string("forward") : o.rewrite.method;
  const Progress progress(common);
  PlanOptions options = o.limits.options(common, progress);
  options.method = method;
  options.device = o.device;
  const auto inputs = make_inputs(o.inputs, o.inputs_file, common.seed, o.limits.estimate ? "meta" : o.device);
  Planned planned(o.model, file.module, o.rewrite, inputs, options);
  Planner& planner = *planned.planner;
  const auto& original = planner.original();
  const PlanPoint point =
      o.budget.empty() ? planner.smallest() : planner.plan(parse_size(o.budget, "--budget", original.peak_bytes));
  json again = json::array();
  for (size_t s = 0; s < planned.report.sites.size(); ++s)
    if (const Site& site = planned.report.sites[s]; site.dear && point.again[s])
      again.push_back({{"module", site.module}, {"op", site.op}});
  predicted = {{"budget", point.budget},
               {"peak_bytes", point.predicted_peak_bytes},
               {"seconds", point.predicted_seconds},
               {"kept_bytes", point.kept_bytes},
               {"recomputed_flops", point.recomputed_flops},
               {"run_again", again},
               {"original_peak_bytes", original.peak_bytes},
               {"original_seconds", original.seconds},
               {"solver", solver_name()},
               {"solve_seconds", planner.solve_seconds()},
               {"gap", point.gap}};
  if (!o.fit.empty() || !o.batch_sizes.empty()) {
    int64_t weights = 0, gradients = 0;
    std::set<const void*> seen;
    for (const auto& m : file.module.modules())
      for (const auto& v : m._ivalue()->slots())
        for (const auto& t : v.isObject() ? std::vector<at::Tensor>() : all_tensors(v))
          if (t.has_storage() && seen.insert(t.storage().unsafeGetStorageImpl()).second) {
            weights += static_cast<int64_t>(t.storage().nbytes());
            if (t.requires_grad()) gradients += static_cast<int64_t>(t.nbytes());
          }
    const int64_t always = weights + (1 + o.optimizer_states) * gradients;
    int64_t inputs_bytes = 0;
    for (const auto& t : all_tensors(c10::ivalue::Tuple::create(inputs)))
      inputs_bytes += static_cast<int64_t>(t.nbytes());
    const int64_t given = planner.batch();
    const double input_each = static_cast<double>(inputs_bytes) / static_cast<double>(given);
    const auto total = [&](int64_t batch, int64_t peak) {
      return always + peak + static_cast<int64_t>(input_each * static_cast<double>(batch));
    };
    auto line = planner.batches(point.again, 2 * given);
    // A step with this batch is run where there is memory for it, and time: two steps of at most half a minute.
    const auto measurable = [&](int64_t batch) {
      const double seconds = point.predicted_seconds * static_cast<double>(batch) / static_cast<double>(given);
      return o.limits.estimate || (line.peak(batch) < available_memory() / 10 * 7 && seconds < 30);
    };
    predicted["weights_bytes"] = weights;
    predicted["gradient_and_optimizer_bytes"] = always - weights;
    json sizes = json::array();
    if (!o.batch_sizes.empty())
      for (int64_t b : parse_batch_sizes(o.batch_sizes)) {
        const bool run = b != given && measurable(b);
        const int64_t peak = run ? planner.batches(point.again, b).peak(b) : line.peak(b);
        sizes.push_back(
            {{"batch", b}, {"peak_bytes", peak}, {"total_bytes", total(b, peak)}, {"measured", run || b == given}});
      }
    predicted["batch_sizes"] = sizes;
    if (!o.fit.empty()) {
      const int64_t size = parse_size(o.fit, "--fit", 0);
      const auto largest = [&] {
        int64_t batch = line.largest(size - always);
        while (batch > 0 && total(batch, line.peak(batch)) > size) batch -= std::max<int64_t>(1, batch / 1000);
        return batch;
      };
      // Between measured batches bytes grow in proportion, elsewhere roughly: so the answer is measured too.
      int64_t batch = largest();
      bool measured = batch == given || batch == 2 * given;
      for (int i = 0; i < 4 && batch > 0 && !measured && measurable(batch); ++i) {
        line = planner.batches(point.again, batch);
        measured = total(batch, line.peak(batch)) <= size;
        if (!measured) batch = std::min(largest(), batch - 1);
      }
      predicted["fit"] = {{"bytes", size},
                          {"batch", batch},
                          {"total_bytes", batch ? total(batch, line.peak(batch)) : 0},
                          {"measured", measured}};
    }
  }
  planned.planner.reset();  // puts the module's state back
  set_choice(file.module, planned.report.sites, point.again);
  progress.clear();
  return std::move(planned.report);
}

void print_plan(const json& p) {
  const auto bytes = [&](const char* key) { return p[key].get<double>(); };
  print(
      fmt::format("Plan: peak {} of the original's {} ({:.3f}), step {:.3f} of the original's time; {} "
                  "convolutions, linear layers and the like run again in backward\n",
                  bytes_text(p["peak_bytes"]), bytes_text(p["original_peak_bytes"]),
                  bytes("peak_bytes") / bytes("original_peak_bytes"), bytes("seconds") / bytes("original_seconds"),
                  p["run_again"].size()));
  if (!p.contains("weights_bytes")) return;
  print(fmt::format("  weights {}, gradients and optimizer {}\n", bytes_text(p["weights_bytes"]),
                    bytes_text(p["gradient_and_optimizer_bytes"])));
  for (const auto& b : p["batch_sizes"])
    print(fmt::format("  batch {}: peak {}, with weights, gradients, optimizer and input {}\n",
                      b["batch"].get<int64_t>(), bytes_text(b["peak_bytes"]),
                      bytes_text(b["total_bytes"]) + (b["measured"] ? "" : " (not measured)")));
  if (!p.contains("fit")) return;
  const auto batch = p["fit"]["batch"].get<int64_t>();
  print(batch > 0 ? fmt::format("  The largest batch in {}: {}{} ({})\n", bytes_text(p["fit"]["bytes"]),
                                p["fit"]["measured"] ? "" : "about ", batch, bytes_text(p["fit"]["total_bytes"]))
                  : fmt::format("  No batch fits in {}\n", bytes_text(p["fit"]["bytes"])));
}

int rewrite_file(Options& o, const Common& common, const CLI::App& app) {
  refuse_conflicts(o, app);
  settle_level(o, app);
  check_files(o);
  require_device(o.device);
  auto file = load_model(o.model);
  if (!o.rewrite.method.empty() && !file.module.find_method(o.rewrite.method)) {
    std::vector<std::string> names;
    for (auto& method : file.module.get_methods()) names.push_back(method.name());
    throw Error(kUsage,
                "The model has no method '" + o.rewrite.method + "'" + did_you_mean(o.rewrite.method, names) + ".");
  }
  if ((!o.inputs.empty() || !o.inputs_file.empty()) && !o.limits.estimate)  // before the work, not after it
    check_inputs(file.module, o.rewrite.method.empty() ? "forward" : o.rewrite.method,
                 make_inputs(o.inputs, o.inputs_file, common.seed, o.device));

  RewriteReport report;
  json predicted;
  if (o.undo) {
    if (!restore(file.module))
      throw Error(kBadInput, "'" + o.model + "' has nothing to restore: tsmem did not write it.");
    file.extra_files.erase("tsmem.json");
  } else {
    o.rewrite.level = o.level == "ops" ? Level::ops : Level::regions;
    restore(file.module);  // a rewrite starts from the originals, a dry run too
    if (o.level == "plan")
      report = plan_file(o, common, file, predicted);
    else
      report = rewrite(file.module, o.rewrite, o.dry_run);
    json about = {{"tool", "tsmem"},
                  {"version", TSMEM_VERSION},
                  {"torch", TORCH_VERSION},
                  {"options", options_json(o)},
                  {"matches", matches_json(report)}};
    if (!predicted.is_null()) about["plan"] = predicted;
    file.extra_files["tsmem.json"] = about.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  }
  if (!o.dry_run) {
    PendingModel pending(file.module, file.extra_files, o.output, o.force);
    file.module = torch::jit::Module();  // its weights are not needed beside the two that are compared
    if (!check_written(o, common, pending.temporary())) return kDifferent;
    pending.commit();
  }

  if (!o.json_file.empty()) write_json(report_json(o, report, predicted), o.json_file, {o.model, o.output});
  bool json_on_stdout = o.json_file == "-";
  if (!common.quiet && !json_on_stdout) {
    if (!o.undo && !report.matches.empty()) print_matches(report, common.verbose);
    size_t checkpoints =
        std::count_if(report.regions.begin(), report.regions.end(), [](const Region& r) { return r.whole; });
    if (checkpoints)
      print(fmt::format("{} module calls keep their arguments alone and run again in backward\n", checkpoints));
    if (!o.rewrite.amp.empty())
      print(fmt::format("{} runs under autocast to {}\n", o.rewrite.method.empty() ? "forward" : o.rewrite.method,
                        o.rewrite.amp));
    if (!predicted.is_null()) print_plan(predicted);
    if (!o.undo && report.matches.empty() && !checkpoints && o.rewrite.amp.empty())
      print("No pattern matches this model, so there is nothing to rewrite.\n");
  }
  if (o.explain && !json_on_stdout) {
    if (!common.quiet) print("\n");
    print_refusals(report, use_color(common));
  }
  if (common.quiet || json_on_stdout) return kOk;
  if (o.dry_run)
    print("Nothing was written (--dry-run).\n");
  else if (o.undo)
    print("Restored the original methods, with the weights as they are now: " + o.output + "\n");
  else if (report.matches.empty() && report.regions.empty() && o.rewrite.amp.empty())
    print("Written unchanged: " + o.output + "\n");
  else
    print("Written: " + o.output + "\n");
  return kOk;
}

}  // namespace

Run add_rewrite(CLI::App& app, const Common& common) {
  auto o = std::make_shared<Options>();
  auto many = [&](const char* name, std::vector<std::string>& to, const char* what, const char* type) {
    return app.add_option(name, to, what)->type_name(type)->allow_extra_args(false);
  };
  app.add_option("MODEL.pt", o->model, "A TorchScript file")->required();
  app.add_option("-o,--output", o->output, "The rewritten file; needed unless --dry-run")->type_name("OUT.pt");
  app.add_option(
         "--level", o->level,
         "ops: operator by operator. regions (default): norms, activations and the like are made again in backward, no "
         "convolution is. plan: the fastest choice for --budget, convolutions, linear layers and attentions included")
      ->check(CLI::IsMember({"ops", "regions", "plan"}));
  many("--input", o->inputs, "An argument of forward, such as 8x3x224x224: verify the numbers too; repeatable", "SPEC");
  app.add_option("--inputs", o->inputs_file, "All arguments at once: a tuple saved by torch.save")
      ->type_name("@FILE.pt");
  many("--only", o->rewrite.only, "Use this pattern alone; repeatable", "NAME");
  many("--skip", o->rewrite.skip, "Do not use this pattern; repeatable", "NAME");
  many("--module", o->rewrite.module_globs, "Rewrite inside these modules only, such as 'layer3.*'; repeatable",
       "GLOB");
  many("--checkpoint", o->rewrite.checkpoint,
       "Keep nothing inside these modules: they run again in backward, such as 'layer3.*'; repeatable", "GLOB");
  many("--freeze", o->rewrite.freeze, "Clear requires_grad of these parameters; repeatable", "GLOB");
  many("--train", o->rewrite.train, "Set requires_grad of these parameters; repeatable", "GLOB");
  app.add_option("--amp", o->rewrite.amp,
                 "Write autocast into forward: convolutions and matrix products run, and are kept, in half the bytes; "
                 "f16 needs a gradient scaler")
      ->check(CLI::IsMember({"bf16", "f16"}));
  app.add_option("--method", o->rewrite.method, "Rewrite this method and what it calls (default: every method)")
      ->type_name("NAME");
  app.add_option("--device", o->device, "Where to verify: cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_flag("--restore", o->undo, "Undo a rewrite; the weights stay as they are");
  app.add_flag("--explain", o->explain, "Print what almost matched, and why not");
  app.add_flag("--dry-run", o->dry_run, "Write nothing");
  app.add_flag("--force", o->force, "Replace an existing output");
  app.add_flag("--thorough", o->thorough,
               "With --input: compare every call on the inputs given, however long it takes");
  app.add_flag("--no-verify", o->no_verify, "Do not verify the numbers, only the structure: for plans of large models");
  app.add_option("--json", o->json_file, "Write a report; '-' for standard output")->type_name("FILE");
  app.add_option("--budget", o->budget,
                 "Peak bytes of a training step with --input, such as 2GiB, or 40% of the original's; implies --level "
                 "plan")
      ->type_name("SIZE");
  o->limits.add(app);
  app.add_option("--batch-sizes", o->batch_sizes, "Also say what the plan needs at these batch sizes")
      ->type_name("N,N,...");
  app.add_option("--fit", o->fit,
                 "Say the largest batch that trains in this much memory, weights, gradients and optimizer states "
                 "included; without --budget for the plan with the smallest peak")
      ->type_name("SIZE");
  app.add_option("--optimizer-states", o->optimizer_states,
                 "Tensors of a parameter's size that the optimizer holds for it, such as 2 for Adam (default 0)")
      ->type_name("N")
      ->check(whole_number(0, 100));
  app.footer("Example: tsmem rewrite model.pt -o model.mem.pt --input 8x3x224x224");
  return [o, &common, &app] { return rewrite_file(*o, common, app); };
}

}  // namespace tsmem::cli
