// tsmem diff: what differs between two models' graphs.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "cli.h"
#include "rewriter/diff.h"
#include "rewriter/error.h"
#include "rewriter/model_file.h"

namespace tsmem::cli {
namespace {

struct Options {
  std::string a, b, format = "text", method;
  bool stat = false;
};

int show_diff(const Options& o, const Common& common) {
  if (o.format == "html")
    throw Error(kUsage, "This version of tsmem does not write HTML; use --format text, or json for programs.");
  if (o.format == "json" && o.stat) throw Error(kUsage, "--stat is for --format text; JSON has the counts anyway.");
  auto a = load_model(o.a).module, b = load_model(o.b).module;
  auto d = diff(a, b, o.method);
  bool equal = std::all_of(d.begin(), d.end(), [](auto& m) { return m.status == "same"; });
  if (o.format == "json") {
    write_json(to_json(d), "-", {});
    return equal ? kOk : kDifferent;
  }
  if (!common.quiet && !equal) print("- " + o.a + "\n+ " + o.b + "\n\n");
  if (!common.quiet || !equal) print(render_text(d, o.stat, use_color(common)));
  if (!common.quiet && o.method.empty()) {
    std::set<std::string> shown;  // methods that only call each other differ alike
    for (auto& method : a.get_methods()) {
      if (method.name().starts_with("_tsmem_") || !b.find_method(method.name())) continue;
      auto total = ops_lines(total_difference(a, b, method.name()), use_color(common));
      if (!total.empty() && shown.insert(total).second) print(method.name() + " in all, with what it calls:\n" + total);
    }
    for (auto& [path, module] : {std::make_pair(o.a, a), std::make_pair(o.b, b)})
      if (auto kept = kept_methods(module))
        print(fmt::format("{} keeps {} (named _tsmem_*), not compared.\n", path, counted(kept, "original method")));
  }
  return equal ? kOk : kDifferent;
}

}  // namespace

Run add_diff(CLI::App& app, const Common& common) {
  auto o = std::make_shared<Options>();
  app.add_option("A.pt", o->a, "A TorchScript file")->required();
  app.add_option("B.pt", o->b, "Another")->required();
  app.add_option("--format", o->format, "text (default) or json; html: not in this version")
      ->check(CLI::IsMember({"text", "json", "html"}));
  app.add_option("--method", o->method, "Compare this method of every class alone")->type_name("NAME");
  app.add_flag("--stat", o->stat, "Print operators that went and came, without the lines");
  app.footer(
      "Weights are not compared: 'tsmem verify' does that. Exit code 1 where there is a difference.\n\n"
      "Example: tsmem diff model.pt model.mem.pt --stat");
  return [o, &common] { return show_diff(*o, common); };
}

}  // namespace tsmem::cli
