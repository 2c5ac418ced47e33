// tsmem profile: run training steps, print where the memory goes.
#include <fmt/format.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "cli/png.h"
#include "cli/run_options.h"
#include "cli/timeline.h"
#include "rewriter/error.h"
#include "rewriter/file/model_file.h"
#include "rewriter/file/new_file.h"
#include "rewriter/measure/as_it_runs.h"
#include "rewriter/measure/freed_memory.h"
#include "rewriter/measure/inputs.h"
#include "rewriter/measure/profile.h"

namespace tsmem::cli {
namespace {

struct ProfileArguments {
  std::string model, other, plot, trace;
  RunOptions run;
  bool eval = false, input_grad = false;
  int depth = 2, steps = 5, warmup = 3;
};

int depth_of(const std::string& path) {
  return path.empty() ? 0 : 1 + static_cast<int>(std::count(path.begin(), path.end(), '.'));
}

// Every module with what the modules inside of it have added.
std::map<std::string, ModuleMemory> totals(const Profile& p) {
  std::map<std::string, ModuleMemory> sums;
  for (auto& m : p.modules) sums[m.path] = {m.path, m.type};
  for (auto& m : p.modules)
    for (auto path = m.path;; path = parent(path)) {
      auto& s = sums[path];
      s.saved_bytes += m.saved_bytes;
      s.forward_bytes += m.forward_bytes;
      s.backward_bytes += m.backward_bytes;
      s.forward_seconds += m.forward_seconds;
      s.backward_seconds += m.backward_seconds;
      if (path.empty()) break;
    }
  return sums;
}

std::string label(const std::string& path) {
  if (path.empty()) return "(model)";
  return std::string(2 * static_cast<size_t>(depth_of(path)), ' ') + path.substr(path.rfind('.') + 1);
}

void print_tree(const Profile& p, const Profile* other, const ProfileArguments& o) {
  auto sums = totals(p);
  auto theirs = other ? totals(*other) : std::map<std::string, ModuleMemory>();
  std::vector<std::vector<std::string>> rows;
  if (other)
    rows.push_back({"module", "type", "saved", "saved vs", "ratio", "backward", "backward vs", "time", "time vs"});
  else
    rows.push_back({"module", "type", "saved", "share", "forward", "backward", "time"});
  const auto time = [](const ModuleMemory& m) { return seconds_text(m.forward_seconds + m.backward_seconds); };
  size_t folded = 0;
  for (auto& m : p.modules) {
    auto& s = sums[m.path];
    auto* t = theirs.contains(m.path) ? &theirs[m.path] : nullptr;
    bool empty = s.saved_bytes + s.forward_bytes + s.backward_bytes == 0 &&
                 (!t || t->saved_bytes + t->forward_bytes + t->backward_bytes == 0);
    if (empty && !m.path.empty()) continue;
    if (o.depth >= 0 && depth_of(m.path) > o.depth) {
      ++folded;
      continue;
    }
    if (other)
      rows.push_back({label(m.path), m.type, bytes_text(s.saved_bytes), t ? bytes_text(t->saved_bytes) : "-",
                      t ? ratio_text(static_cast<double>(t->saved_bytes), static_cast<double>(s.saved_bytes)) : "-",
                      bytes_text(s.backward_bytes), t ? bytes_text(t->backward_bytes) : "-", time(s),
                      t ? time(*t) : "-"});
    else
      rows.push_back({label(m.path), m.type, bytes_text(s.saved_bytes),
                      p.saved_bytes ? fmt::format("{:.1f} %", 100.0 * static_cast<double>(s.saved_bytes) /
                                                                  static_cast<double>(p.saved_bytes))
                                    : "-",
                      bytes_text(s.forward_bytes), bytes_text(s.backward_bytes), time(s)});
  }
  for (size_t c = 2; c < rows[0].size(); ++c) align_right(rows, c);
  print(table(rows));
  if (folded)
    print(fmt::format("{} deeper {} folded into the rows above; --depth -1 shows all.\n", folded,
                      folded == 1 ? "module is" : "modules are"));
}

void print_ops(const Profile& p, const Profile* other) {
  std::map<std::string, OpMemory> theirs;
  if (other)
    for (auto& op : other->ops) theirs[op.op] = op;
  std::vector<std::vector<std::string>> rows = {{"saved by", "bytes", "tensors"}};
  if (other) rows[0].insert(rows[0].end(), {"bytes vs", "tensors vs"});
  auto add = [&](const std::string& name, const OpMemory* a, const OpMemory* b) {
    rows.push_back({name.empty() ? "(no operator)" : name, a ? bytes_text(a->saved_bytes) : "-",
                    a ? std::to_string(a->count) : "-"});
    if (other)
      rows.back().insert(rows.back().end(), {b ? bytes_text(b->saved_bytes) : "-", b ? std::to_string(b->count) : "-"});
  };
  for (auto& op : p.ops) {
    auto it = theirs.find(op.op);
    add(op.op, &op, it == theirs.end() ? nullptr : &it->second);
    if (it != theirs.end()) theirs.erase(it);
  }
  if (other)
    for (auto& op : other->ops)
      if (theirs.contains(op.op)) add(op.op, nullptr, &op);
  if (rows.size() == 1) return;
  for (size_t c = 1; c < rows[0].size(); ++c) align_right(rows, c);
  print("\n" + table(rows));
}

void print_ways(const Profile& p) {
  if (p.ways.empty()) return;
  print("\nWhat has a plain and a fused kernel, and which of them is taken:\n");
  for (const std::string& way : p.ways) print("  " + way + "\n");
}

void print_totals(const Profile& p, const Profile* other, bool color) {
  std::vector<std::vector<std::string>> rows = {{"", other ? "model" : ""}};
  if (other) rows[0].insert(rows[0].end(), {"vs", "ratio"});
  auto bytes = [&](const char* name, int64_t Profile::*field) {
    rows.push_back({name, bytes_text(p.*field)});
    if (other)
      rows.back().insert(rows.back().end(), {bytes_text(other->*field), ratio_text(static_cast<double>(other->*field),
                                                                                   static_cast<double>(p.*field))});
  };
  auto seconds = [&](const char* name, double Profile::*field) {
    rows.push_back({name, seconds_text(p.*field)});
    if (other)
      rows.back().insert(rows.back().end(), {seconds_text(other->*field), ratio_text(other->*field, p.*field)});
  };
  bytes("inputs", &Profile::input_bytes);
  bytes("parameters", &Profile::parameter_bytes);
  bytes("saved for backward", &Profile::saved_bytes);
  bytes("peak", &Profile::peak_bytes);
  seconds("forward", &Profile::forward_seconds);
  seconds("backward", &Profile::backward_seconds);
  seconds("step", &Profile::step_seconds);
  for (size_t c = 1; c < rows[0].size(); ++c) align_right(rows, c);
  if (!other) rows.erase(rows.begin());
  auto text = table(rows);
  // The line that the command is about.
  auto at = text.find("saved for backward");
  auto end = text.find('\n', at);
  print(text.substr(0, at) + paint(text.substr(at, end - at), Color::bold, color) + text.substr(end) + "\n");
}

// How one model's time compares, with how far that is to be trusted.
void print_ratio(const std::string& other, const TimeRatio& ratio) {
  print(fmt::format(
      "A step of {} takes {:.2f} of the time; the middle half of {} pairs of steps, run in turns, is {:.2f} "
      "to {:.2f}.\n",
      other, ratio.median, ratio.pairs, ratio.low, ratio.high));
}

void print_peak(const std::string& path, const Profile& p) {
  if (p.peak_event < 0) return;
  const Event& e = p.timeline[static_cast<size_t>(p.peak_event)];
  print(fmt::format("{} is at its peak in {}, in {}{}.\n", path, e.backward ? "backward" : "forward",
                    e.module.empty() ? "the model itself" : e.module, e.op.empty() ? "" : " (" + e.op + ")"));
}

bool ends_in(const std::string& path, std::initializer_list<const char*> suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(), [&](const char* s) { return path.ends_with(s); });
}

// Before anything is measured.
void check_files(const ProfileArguments& o) {
  if (!o.plot.empty() && !ends_in(o.plot, {".svg", ".png", ".html", ".htm"}))
    throw Error(ErrorKind::request,
                "--plot '" + o.plot + "' is not a picture that tsmem draws; end its name in .svg, .png or .html.");
  if (o.plot.ends_with(".png")) require_png();
  if (!o.plot.empty() && (o.plot == o.trace || o.plot == o.run.json))
    throw Error(ErrorKind::request, "--plot '" + o.plot + "' names a file that another option writes too.");
  if (!o.trace.empty() && o.trace == o.run.json)
    throw Error(ErrorKind::request, "--trace '" + o.trace + "' and --json name the same file.");
  for (auto& file : {o.plot, o.trace}) check_report(file);
  for (auto& file : {o.plot, o.trace})
    for (auto& model : {o.model, o.other})
      if (!file.empty() && !model.empty() && same_file(file, model))
        throw Error(ErrorKind::request, "'" + file + "' would replace a model that this command reads.");
}

void write_files(const std::vector<TitledProfile>& profiles, const ProfileArguments& o) {
  if (!o.trace.empty()) save_text(chrome_trace(profiles), o.trace);
  if (o.plot.empty()) return;
  const bool page = ends_in(o.plot, {".html", ".htm"});
  const auto picture = page ? timeline_html(profiles) : timeline_svg(profiles);
  save_text(o.plot.ends_with(".png") ? png_of(picture) : picture, o.plot);
}

ProfileOptions profile_options(const ProfileArguments& o, const Common& common) {
  ProfileOptions options;
  options.method = o.run.method;
  options.device = o.run.device;
  options.train = !o.eval;
  options.input_grad = o.input_grad;
  options.seed = common.seed;
  options.steps = o.steps;
  options.warmup = o.warmup;
  return options;
}

// Of a model in a file, which an error is about.
Profile measure(const std::string& path, ModelFile& file, const std::vector<c10::IValue>& inputs,
                ProfileOptions options, const Progress& progress) {
  options.progress = [&](const std::string& text) { progress(path + ": " + text); };
  const auto guard = as_it_runs(file.exported != nullptr);
  try {
    return profile(file.module, inputs, options);
  } catch (const Error& e) {
    throw Error(e.kind, "'" + path + "': " + e.what(), e.option);
  }
}

int run(const ProfileArguments& o, const Common& common) {
  check_files(o);
  o.run.apply();
  require_device(o.run.device);
  auto file = load_model(o.model, o.run.device);
  const auto inputs = make_inputs(o.run.inputs, o.run.inputs_file, common.seed, o.run.device);
  const Progress progress(common);
  ProfileOptions options = profile_options(o, common);
  options.timing = o.other.empty();
  auto p = measure(o.model, file, inputs, options, progress);
  std::unique_ptr<Profile> other;
  TimeRatio ratio;
  if (!o.other.empty()) {
    auto other_file = load_model(o.other, o.run.device);
    other = std::make_unique<Profile>(measure(o.other, other_file, inputs, options, progress));
    options.progress = [&](const std::string& text) { progress(text); };
    const KeepFreedMemory keep;
    const auto guard = as_it_runs(file.exported && other_file.exported);
    ratio = time_in_turns(file.module, p, other_file.module, *other, inputs, options);
  }
  progress.clear();
  if (!o.run.json.empty()) {
    auto json = to_json(p);
    if (other) {
      json["vs"] = to_json(*other);
      json["vs"]["step_ratio"] = {ratio.low, ratio.median, ratio.high};
    }
    write_json(json, o.run.json, {o.model, o.other});
  }
  std::vector<TitledProfile> profiles{{o.model, &p}};
  if (other) profiles.push_back({o.other, other.get()});
  write_files(profiles, o);
  if (o.run.json == "-") return kOk;
  bool color = use_color(common);
  print(paint(o.model, Color::bold, color) + (other ? " and " + paint(o.other, Color::bold, color) : "") +
        fmt::format(", {} mode, on {}\n\n", o.eval ? "eval" : "train", o.run.device));
  print_totals(p, other.get(), color);
  if (!p.has_backward)
    print("No output needs a gradient, so there was no backward; --input-grad asks for the inputs' gradients.\n\n");
  if (other) print_ratio(o.other, ratio);
  for (auto& titled : profiles) print_peak(titled.title, *titled.profile);
  print("\n");
  print_tree(p, other.get(), o);
  print_ops(p, other.get());
  print_ways(other ? *other : p);  // the last one has seen what both do
  return kOk;
}

}  // namespace

Run add_profile(CLI::App& app, const Common& common) {
  auto o = std::make_shared<ProfileArguments>();
  app.add_option("MODEL.pt", o->model, "A TorchScript file, or a program of torch.export (.pt2)")->required();
  o->run.add(app);
  app.add_flag("--eval", o->eval, "In eval mode (default: train mode); backward runs all the same");
  app.add_flag("--input-grad", o->input_grad, "Floating-point inputs need a gradient too");
  app.add_option("--vs", o->other, "Measure this model too, and print both side by side")->type_name("OTHER.pt");
  app.add_option("--depth", o->depth, "Fold modules deeper than this (default 2; -1: show all)")
      ->type_name("N")
      ->check(whole_number(-1, 1000));
  app.add_option("--steps", o->steps,
                 "Timed steps, after the warm-up; with --vs in turns with the other model's (default 5)")
      ->type_name("N")
      ->check(whole_number(5, 100000));
  app.add_option("--warmup", o->warmup, "Steps before the one that is recorded (default 3)")
      ->type_name("N")
      ->check(whole_number(3, 100000));
  app.add_option("--plot", o->plot,
                 "Draw live bytes over the step by module, as .svg, .png or .html (one page, with zoom and a table)")
      ->type_name("FILE");
  app.add_option("--trace", o->trace, "Write ops and live bytes for chrome://tracing and ui.perfetto.dev")
      ->type_name("FILE.json");
  app.footer(
      "Example: tsmem profile model.pt --input 8x3x224x224 --vs model.mem.pt --plot memory.html\n\n"
      "saved: bytes alive after forward because backward needs them; peak: the most bytes that a step has allocated at "
      "once.\n"
      "forward, backward: bytes allocated there, freed again or not. time: in a module's operators and their backward, "
      "in the recorded step.");
  return [o, &common] { return run(*o, common); };
}

}  // namespace tsmem::cli
