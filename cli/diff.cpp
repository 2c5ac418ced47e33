// tsmem diff: what differs between two models' graphs.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/cli.h"
#include "cli/page.h"
#include "rewriter/compare/diff.h"
#include "rewriter/compare/diff_text.h"
#include "rewriter/error.h"
#include "rewriter/file/model_file.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/rewrite/rewrite.h"

namespace tsmem::cli {
namespace {

struct DiffArguments {
  std::string a, b, format = "text", method;
  bool stat = false;
};

nlohmann::json operators(const MethodDiff& d) {
  const auto [removed, added] = changed_ops(d);
  return {{"removed", removed}, {"added", added}};
}

// What page/diff.js draws.
nlohmann::json page_data(const DiffArguments& o, const std::vector<MethodDiff>& d,
                         const std::vector<MethodDiff>& totals) {
  nlohmann::json data = {
      {"a", o.a}, {"b", o.b}, {"methods", nlohmann::json::array()}, {"totals", nlohmann::json::array()}};
  std::set<nlohmann::json> seen;  // methods that only call each other differ alike
  for (auto& t : totals) {
    auto total = operators(t);
    if ((t.removed_ops.empty() && t.added_ops.empty()) || !seen.insert(total).second) continue;
    total["method"] = t.method;
    data["totals"].push_back(total);
  }
  for (auto& m : d) {
    auto method = operators(m);
    method.update({{"path", m.path},
                   {"type", m.type},
                   {"method", m.method},
                   {"status", m.status},
                   {"instances", m.instances},
                   {"of_torch", m.of_torch}});
    auto rows = nlohmann::json::array();
    if (m.status != "same")
      for (auto& [a, b] : side_by_side(m)) {
        const auto number = [](auto& i) { return i ? nlohmann::json(*i + 1) : nlohmann::json(); };
        const auto line = [](auto& i, auto& lines) { return i ? nlohmann::json(lines[*i]) : nlohmann::json(); };
        rows.push_back({number(a), line(a, m.a), number(b), line(b, m.b), a && b && m.a[*a] == m.b[*b]});
      }
    method["rows"] = rows;
    data["methods"].push_back(method);
  }
  return data;
}

// Of every method of both models, with all that it calls.
std::vector<MethodDiff> all_totals(const torch::jit::Module& a, const torch::jit::Module& b) {
  std::vector<MethodDiff> totals;
  for (auto& method : a.get_methods()) {
    if (is_added_name(method.name()) || !b.find_method(method.name())) continue;
    auto total = total_difference(a, b, method.name());
    total.method = method.name();
    totals.push_back(std::move(total));
  }
  return totals;
}

size_t count_added_methods(const torch::jit::Module& module) {
  size_t count = 0;
  for (const ModuleClass& c : module_classes(module)) count += added_methods(*c.type).size();
  return count;
}

int show_diff(const DiffArguments& o, const Common& common) {
  if (o.format != "text" && o.stat)
    throw Error(ErrorKind::request, "--stat is for --format text; the others have the counts anyway.");
  auto a = load_model(o.a).module, b = load_model(o.b).module;
  auto d = diff(a, b, o.method);
  bool equal = std::all_of(d.begin(), d.end(), [](auto& m) { return m.status == "same"; });
  if (o.format == "json") {
    write_json(to_json(d), "-", {});
    return equal ? kOk : kDifferent;
  }
  if (o.format == "html") {
    print(page("tsmem diff", {kDiffScript},
               page_data(o, d, o.method.empty() ? all_totals(a, b) : std::vector<MethodDiff>{})));
    return equal ? kOk : kDifferent;
  }
  if (!common.quiet && !equal) print("- " + o.a + "\n+ " + o.b + "\n\n");
  if (!common.quiet || !equal) print(render_text(d, o.stat, use_color(common)));
  if (!common.quiet && o.method.empty()) {
    std::set<std::string> shown;  // methods that only call each other differ alike
    for (auto& d : all_totals(a, b)) {
      auto total = ops_lines(d, use_color(common));
      if (!total.empty() && shown.insert(total).second) print(d.method + " in all, with what it calls:\n" + total);
    }
    for (auto& [path, module] : {std::make_pair(o.a, a), std::make_pair(o.b, b)})
      if (auto kept = count_added_methods(module))
        print(fmt::format("{} keeps {} (named _tsmem_*), not compared.\n", path, counted(kept, "method")));
  }
  return equal ? kOk : kDifferent;
}

}  // namespace

Run add_diff(CLI::App& app, const Common& common) {
  auto o = std::make_shared<DiffArguments>();
  app.add_option("A.pt", o->a, "A TorchScript file, or a program of torch.export (.pt2)")->required();
  app.add_option("B.pt", o->b, "Another")->required();
  app.add_option("--format", o->format, "text (default), json, or html: one page with both side by side")
      ->check(CLI::IsMember({"text", "json", "html"}));
  app.add_option("--method", o->method, "Compare this method of every class alone")->type_name("NAME");
  app.add_flag("--stat", o->stat, "Print operators that went and came, without the lines");
  app.footer(
      "Weights are not compared: 'tsmem verify' does that. Exit code 1 where there is a difference.\n\n"
      "Examples: tsmem diff model.pt model.mem.pt --stat\n"
      "          tsmem diff model.pt model.mem.pt --format html > diff.html");
  return [o, &common] { return show_diff(*o, common); };
}

}  // namespace tsmem::cli
