// tsmem rewrite: its options, and what it prints.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>

#include "cli/cli.h"
#include "cli/planning.h"
#include "cli/run_options.h"
#include "cli/saved.h"
#include "patterns/pattern.h"
#include "rewriter/error.h"
#include "rewriter/file/new_file.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/plan/size.h"
#include "rewriter/session/report_json.h"
#include "rewriter/text.h"
#include "tsmem/session.h"

namespace tsmem::cli {
namespace {

using nlohmann::json;
using torch::jit::Module;

struct RewriteArguments {
  std::string model, output, level = "regions", budget, inputs_file, device = "cpu", batch_sizes, fit, json_file;
  std::vector<std::string> inputs, patterns;
  int optimizer_states = 0, threads = 0;
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
      throw Error(ErrorKind::request, "--batch-sizes '" + text + "' is not a list of batch sizes: write 32,64,128.");
    sizes.push_back(std::stoll(part));
  }
  if (sizes.empty()) throw Error(ErrorKind::request, "--batch-sizes '' is not a list of batch sizes: write 32,64,128.");
  return sizes;
}

// Sets the level to plan where another option implies it.
void settle_level(RewriteArguments& o, const CLI::App& app) {
  const auto given = [&](const char* name) { return app.get_option(name)->count() > 0; };
  if (given("--level") && o.level == "ops" && given("--checkpoint"))
    throw Error(ErrorKind::request, "--level ops and --checkpoint exclude each other.");
  for (auto name : {"--budget", "--fit", "--batch-sizes", "--estimate"}) {
    if (!given(name)) continue;
    if (given("--level") && o.level != "plan")
      throw Error(ErrorKind::request, fmt::format("--level {} and {} exclude each other.", o.level, name));
    o.level = "plan";
  }
  for (auto name : {"--optimizer-states", "--solve-seconds", "--offload", "--link"})
    if (given(name) && o.level != "plan")
      throw Error(ErrorKind::request, fmt::format("{} is for plans: give --budget too.", name));
  if (given("--optimizer-states") && !given("--fit") && !given("--batch-sizes"))
    throw Error(ErrorKind::request, "--optimizer-states is for --fit and --batch-sizes, and neither is given.");
  // Before the work, not after it.
  if (given("--budget")) parse_size(o.budget, "--budget", 1 << 20);
  if (given("--fit")) parse_size(o.fit, "--fit", 0);
  if (given("--batch-sizes")) parse_batch_sizes(o.batch_sizes);
  if (o.thorough && (o.no_verify || (!given("--input") && !given("--inputs"))))
    throw Error(ErrorKind::request,
                "--thorough says how to compare the numbers: give --input too, and no --no-verify.");
  if (o.level != "plan") return;
  if (!given("--budget") && !given("--fit"))
    throw Error(ErrorKind::request, "A plan needs a budget: --budget 2GiB, or --budget 40% of the original's peak.");
  o.limits.check(given("--input") || given("--inputs"), o.rewrite.amp);
}

void refuse_conflicts(const RewriteArguments& o, const CLI::App& app) {
  if (!o.undo) return;
  for (auto name : {"--patterns", "--only", "--skip", "--module", "--checkpoint", "--freeze", "--train", "--method",
                    "--explain", "--amp", "--budget", "--fit", "--batch-sizes", "--estimate", "--offload"})
    if (app.get_option(name)->count() > 0)
      throw Error(ErrorKind::request, std::string("--restore and ") + name + " exclude each other.");
}

void check_files(const RewriteArguments& o) {
  check_report(o.json_file);
  if (o.output.empty()) {
    if (!o.dry_run) throw Error(ErrorKind::request, "Name the output with -o OUT.pt, or use --dry-run.");
  } else {
    if (same_file(o.model, o.output))
      throw Error(ErrorKind::request,
                  "The output '" + o.output + "' is the input, which is never overwritten; choose another name.");
    if (!o.dry_run) check_output(o.output, o.force);
  }
  for (auto& file : {o.model, o.output})
    if (!o.json_file.empty() && !file.empty() && (o.json_file == file || same_file(o.json_file, file)))
      throw Error(ErrorKind::request, "--json '" + o.json_file + "' is the model's own name; choose another.");
}

json report_json(const RewriteArguments& o, const RewriteReport& report, const ChosenPlan* plan) {
  json all = {{"tool", "tsmem"},
              {"version", TSMEM_VERSION},
              {"input", o.model},
              {"output", o.dry_run ? json() : json(o.output)},
              {"predicted", plan ? to_json(*plan) : json()}};
  all.update(to_json(report));
  return all;
}

// "before: a, b; after: a (in some cases: c)" -> "a"; 'tsmem patterns' has the whole.
std::string kept_after(const Pattern& pattern) {
  auto at = pattern.keeps.find("after: ");
  auto text = at == std::string::npos ? pattern.keeps : pattern.keeps.substr(at + 7);
  return text.substr(0, text.find(" ("));
}

void print_matches(const RewriteReport& report, const std::vector<Pattern>& own, bool verbose) {
  std::map<std::string, size_t> counts;
  for (auto& match : report.matches) ++counts[match.pattern];
  std::vector<std::vector<std::string>> rows = {{"pattern", "matches", "saved for backward"}};
  for (auto* list : {&own, &all_patterns()})
    for (auto& pattern : *list)
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

// What --checkpoint named and is not wrapped: the user counts on it.
void print_not_checkpointed(const RewriteReport& report) {
  for (auto& r : report.refused)
    if (r.pattern == "checkpoint") print(fmt::format("--checkpoint {}: {}\n", r.module, r.reason));
}

// The modules that --module named and that stay as they are, as their class has other instances.
void print_shared_classes(const RewriteReport& report) {
  std::set<std::string> said;
  for (auto& r : report.refused)
    if (r.shared_class && said.insert(r.reason).second) print("--module: " + r.reason + "\n");
}

// How the output differs from the input, in a word or two for the last line.
std::string written_text(const RewriteArguments& o, const RewriteReport& report, bool rewritten_before) {
  if (!report.matches.empty() || !report.regions.empty() || !o.rewrite.amp.empty()) return "Written";
  std::vector<std::string> changes;
  if (report.bodies) changes.push_back("calls are inlined");
  if (!o.rewrite.freeze.empty() || !o.rewrite.train.empty()) changes.push_back("requires_grad is set as asked");
  if (rewritten_before) changes.push_back("the original methods are restored");
  if (changes.empty()) return "Written unchanged";
  return fmt::format("Written, where {} and nothing else is changed", fmt::join(changes, ", "));
}

bool verifies_numbers(const RewriteArguments& o) {
  return (!o.inputs.empty() || !o.inputs_file.empty()) && !o.limits.estimate && !o.no_verify;
}

// Compares what was written with the original. Prints what differs and returns false where it isn't the same.
bool check_written(const RewriteArguments& o, const Common& common, Session& session,
                   const std::vector<c10::IValue>& inputs) {
  if (!verifies_numbers(o)) {
    if (const auto differences = session.structure_differences(); !differences.empty())
      throw std::runtime_error("The rewritten model differs from the original: " + differences[0]);
    return true;
  }
  VerifyOptions options;
  if (!o.rewrite.method.empty()) options.method = o.rewrite.method;
  options.device = o.device;
  options.seed = common.seed;
  options.spent = seconds_since(common.started);
  options.measure = false;
  if (o.thorough) options.thorough = true;
  const Progress progress(common);
  options.progress = [&](const std::string& text, double done) { progress("verifying: " + text, done); };
  const auto result = session.verify(inputs, options);
  progress.clear();
  if (!result.equal) {
    fmt::print(stderr, "tsmem: The rewritten model failed its verification, so no file was written: {}\n",
               result.verdict);
    return false;
  }
  if (!common.quiet && o.json_file != "-") print("Verified: " + result.verdict + "\n" + compared_line(result) + "\n");
  return true;
}

void print_plan(const ChosenPlan& plan) {
  const PlanPoint& p = plan.point;
  print(
      fmt::format("Plan: peak {} of the original's {} ({:.3f}), step {:.3f} of the original's time; {} "
                  "convolutions, linear layers and the like run again in backward\n",
                  bytes_text(p.predicted_peak_bytes), bytes_text(plan.original.peak_bytes),
                  static_cast<double>(p.predicted_peak_bytes) / static_cast<double>(plan.original.peak_bytes),
                  p.predicted_seconds / plan.original.seconds, plan.run_again.size()));
  if (!plan.offloaded.empty())
    print(fmt::format("  {}, {}, wait in the host's memory\n", counted(plan.offloaded.size(), "output"),
                      bytes_text(p.offloaded_bytes)));
  if (!plan.batches) return;
  const auto& batches = *plan.batches;
  print(fmt::format("  weights {}, gradients and optimizer {}\n", bytes_text(batches.weight_bytes),
                    bytes_text(batches.gradient_and_optimizer_bytes)));
  for (const BatchMemory& b : batches.asked)
    print(fmt::format("  batch {}: peak {}, with weights, gradients, optimizer and input {}{}\n", b.batch,
                      bytes_text(b.peak_bytes), bytes_text(b.total_bytes), b.measured ? "" : " (not measured)"));
  if (const auto& largest = batches.largest)
    print(largest->batch > 0
              ? fmt::format("  The largest batch in {}: {}{} ({})\n", bytes_text(batches.fit_bytes),
                            largest->measured ? "" : "about ", largest->batch, bytes_text(largest->total_bytes))
              : fmt::format("  No batch fits in {}\n", bytes_text(batches.fit_bytes)));
}

// The arguments that were given, as the method takes them; none where none were given. They are checked before the
// work, not after it.
std::vector<c10::IValue> given_inputs(const RewriteArguments& o, const Common& common, const Session& session,
                                      const std::string& method) {
  if (o.inputs.empty() && o.inputs_file.empty()) return {};
  auto inputs = make_inputs(o.inputs, o.inputs_file, common.seed, o.limits.estimate ? "meta" : o.device);
  if (!o.limits.estimate) check_inputs(session.module(), method, inputs);
  return inputs;
}

void check_method(const Module& module, const std::string& asked) {
  if (asked.empty() || module.find_method(asked)) return;
  std::vector<std::string> names;
  for (const auto& known : module.get_methods()) names.push_back(known.name());
  throw Error(ErrorKind::request, "The model has no method '" + asked + "'" + did_you_mean(asked, names) + ".");
}

PlannedRewrite rewrite_by_plan(const RewriteArguments& o, const Common& common, Session& session,
                               const std::string& method, const std::vector<c10::IValue>& inputs) {
  const Progress progress(common);
  PlanRequest request{o.budget, o.fit, {}, o.optimizer_states, o.limits.options(common, progress)};
  if (!o.batch_sizes.empty()) request.batch_sizes = parse_batch_sizes(o.batch_sizes);
  request.how.method = method;
  request.how.device = o.device;
  PlannedRewrite planned = session.plan(o.rewrite, inputs, request);
  progress.clear();
  return planned;
}

// Writes the result, once it has been compared with the original. False where it isn't the same: then nothing is
// written.
bool write_checked(const RewriteArguments& o, const Common& common, Session& session,
                   const std::vector<c10::IValue>& inputs, RewriteReport& report) {
  session.write(o.output, o.force);
  if (!check_written(o, common, session, inputs)) return false;
  if (!o.undo && !inputs.empty()) {
    const Progress progress(common);
    progress("measuring what is saved for backward");
    session.measure_saved(report, inputs, o.limits.estimate ? "meta" : o.device);
  }
  session.commit();
  return true;
}

// What was done, but for the last line.
void print_report(const RewriteArguments& o, const Common& common, const RewriteReport& report,
                  const ChosenPlan* plan) {
  if (!o.undo && !report.matches.empty()) print_matches(report, o.rewrite.patterns, common.verbose);
  const auto checkpoints =
      std::count_if(report.regions.begin(), report.regions.end(), [](const Region& r) { return r.whole; });
  if (checkpoints)
    print(fmt::format("{} module calls keep their arguments alone and run again in backward\n", checkpoints));
  if (!o.rewrite.amp.empty())
    print(fmt::format("{} runs under autocast to {}\n", o.rewrite.method.empty() ? "forward" : o.rewrite.method,
                      o.rewrite.amp));
  if (plan) print_plan(*plan);
  if (!o.undo && report.matches.empty() && !checkpoints && o.rewrite.amp.empty())
    print("No pattern matches this model, so there is nothing to rewrite.\n");
  print_not_checkpointed(report);
  print_shared_classes(report);
  if (!o.undo) print(saved_text(report.saved, o.rewrite.level, o.explain || common.verbose));
}

std::string last_line(const RewriteArguments& o, const RewriteReport& report, bool rewritten_before) {
  if (o.dry_run) return "Nothing was written (--dry-run).\n";
  if (o.undo) return "Restored the original methods, with the weights as they are now: " + o.output + "\n";
  return written_text(o, report, rewritten_before) + ": " + o.output + "\n";
}

int rewrite_file(RewriteArguments& o, const Common& common, const CLI::App& app) {
  refuse_conflicts(o, app);
  settle_level(o, app);
  check_files(o);
  require_device(o.device);
  if (o.threads > 0) at::set_num_threads(o.threads);
  o.rewrite.patterns = read_patterns(o.patterns);
  o.rewrite.level = o.level == "ops" ? Level::ops : o.level == "plan" ? Level::plan : Level::regions;

  Session session(o.model);
  const bool rewritten_before = is_rewritten(session.module());
  check_method(session.module(), o.rewrite.method);
  const std::string method = o.rewrite.method.empty() ? "forward" : o.rewrite.method;
  const auto inputs = given_inputs(o, common, session, method);
  RewriteReport report;
  std::optional<ChosenPlan> plan;
  if (o.undo) {
    session.restore();
  } else if (o.rewrite.level == Level::plan) {
    PlannedRewrite planned = rewrite_by_plan(o, common, session, method, inputs);
    report = std::move(planned.report);
    plan = std::move(planned.plan);
  } else {
    report = session.rewrite(o.rewrite, o.dry_run);
  }
  if (!o.dry_run && !write_checked(o, common, session, inputs, report)) return kDifferent;

  const ChosenPlan* chosen = plan ? &*plan : nullptr;
  if (!o.json_file.empty()) write_json(report_json(o, report, chosen), o.json_file, {o.model, o.output});
  const bool prints = !common.quiet && o.json_file != "-";
  for (auto& sentence : pattern_overlaps(o.rewrite.patterns))
    if (prints) print("Note: " + sentence + ".\n");
  if (prints) print_report(o, common, report, chosen);
  if (o.explain && o.json_file != "-") {
    if (prints) print("\n");
    print_refusals(report, use_color(common));
  }
  if (prints) print(last_line(o, report, rewritten_before));
  return kOk;
}

}  // namespace

Run add_rewrite(CLI::App& app, const Common& common) {
  auto o = std::make_shared<RewriteArguments>();
  auto many = [&](const char* name, std::vector<std::string>& to, const char* what, const char* type) {
    return app.add_option(name, to, what)->type_name(type)->allow_extra_args(false);
  };
  app.add_option("MODEL.pt", o->model, "A TorchScript file, or a program of torch.export (.pt2)")->required();
  app.add_option("-o,--output", o->output, "The rewritten file; needed unless --dry-run")->type_name("OUT.pt");
  app.add_option("--level", o->level,
                 "ops: operator by operator. regions (default): norms, activations and the like are recomputed in "
                 "backward, and convolutions and linear layers that take few operations. plan: the fastest choice for "
                 "--budget, all convolutions, linear layers and attentions included")
      ->check(CLI::IsMember({"ops", "regions", "plan"}));
  many("--input", o->inputs, "An argument of forward, such as 8x3x224x224: verify the numbers too; repeatable", "SPEC");
  app.add_option("--inputs", o->inputs_file, "All arguments at once: a tuple saved by torch.save")
      ->type_name("@FILE.pt");
  add_patterns_option(app, o->patterns);
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
  app.add_option("--device", o->device, "Where to run what is verified or planned: cpu (default), cuda or cuda:N")
      ->type_name("DEVICE");
  app.add_option("--threads", o->threads, "CPU threads of what runs (default: PyTorch's choice)")
      ->type_name("N")
      ->check(whole_number(1, kMostThreads));
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
