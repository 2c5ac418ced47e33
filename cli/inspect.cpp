// tsmem inspect: what is in a model, and what would be rewritten.
#include <fmt/format.h>
#include <torch/csrc/jit/passes/inliner.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "cli/cli.h"
#include "rewriter/added_names.h"
#include "rewriter/error.h"
#include "rewriter/model_file.h"
#include "rewriter/rewrite.h"

namespace tsmem::cli {
namespace {

using nlohmann::json;
using torch::jit::Module;

struct Options {
  std::string model, method, json_file;
  std::vector<std::string> patterns;
};

struct Row {  // of a module: its own parameters, without its children's
  std::string path, type;
  int64_t parameters = 0, parameter_bytes = 0, trainable = 0, buffer_bytes = 0;
};

int64_t bytes_of(const at::Tensor& t) {
  std::vector<at::Tensor> parts;
  if (t.layout() == at::kStrided)
    parts = {t};
  else if (t.is_sparse())
    parts = {t._indices(), t._values()};
  else if (t.layout() == at::kSparseCsr || t.layout() == at::kSparseBsr)
    parts = {t.crow_indices(), t.col_indices(), t.values()};
  else if (t.layout() == at::kSparseCsc || t.layout() == at::kSparseBsc)
    parts = {t.ccol_indices(), t.row_indices(), t.values()};
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += static_cast<int64_t>(part.nbytes());
  return bytes;
}

std::vector<Row> module_rows(const Module& root) {
  std::vector<Row> rows;
  std::unordered_set<const void*> counted;  // tied parameters once
  for (const auto& m : root.named_modules()) {
    Row row{m.name, m.value.type()->name()->name()};
    for (const auto& p : m.value.parameters(false)) {
      if (!counted.insert(p.unsafeGetTensorImpl()).second) continue;
      row.parameters += p.numel();
      row.parameter_bytes += bytes_of(p);
      if (p.requires_grad()) row.trainable += p.numel();
    }
    for (const auto& b : m.value.buffers(false))
      if (counted.insert(b.unsafeGetTensorImpl()).second) row.buffer_bytes += bytes_of(b);
    rows.push_back(row);
  }
  return rows;
}

// Operators of a method with all that it calls.
std::map<std::string, int> op_counts(const Module& module, const std::string& method) {
  auto graph = module.get_method(method).graph()->copy();
  torch::jit::Inline(*graph);
  std::map<std::string, int> counts;
  std::function<void(const torch::jit::Block*)> walk = [&](const torch::jit::Block* b) {
    for (const auto* n : b->nodes()) {
      if (!n->kind().is_prim()) ++counts[n->kind().toQualString()];
      for (const auto* inner : n->blocks()) walk(inner);
    }
  };
  walk(graph->block());
  return counts;
}

int inspect_file(const Options& o, const Common& common) {
  RewriteOptions options;
  options.patterns = read_patterns(o.patterns);
  auto file = load_model(o.model, "meta");  // names and shapes are enough
  Module& module = file.module;
  std::vector<std::string> names, all_names;
  for (const auto& method : module.get_methods()) {
    all_names.push_back(method.name());
    if (!is_added_name(method.name())) names.push_back(method.name());
  }
  if (!o.method.empty()) {
    if (std::find(all_names.begin(), all_names.end(), o.method) == all_names.end())
      throw Error(ErrorKind::request,
                  "The model has no method '" + o.method + "'" + did_you_mean(o.method, names) + ".");
    names = {o.method};
  }
  auto rows = module_rows(module);
  std::map<std::string, std::map<std::string, int>> ops;
  json methods = json::array();
  for (auto& name : names) {
    ops[name] = op_counts(module, name);
    methods.push_back(
        {{"name", name}, {"schema", c10::str(module.get_method(name).function().getSchema())}, {"ops", ops[name]}});
  }
  bool rewritten = is_rewritten(module);
  if (rewritten) restore(module);  // what would match is a question about the originals
  options.method = is_added_name(o.method) ? "" : o.method;
  auto report = rewrite(module, options, true);
  std::map<std::string, size_t> matches;
  for (auto& match : report.matches) ++matches[match.pattern];

  Row total;
  json modules = json::array();
  for (auto& row : rows) {
    total.parameters += row.parameters;
    total.parameter_bytes += row.parameter_bytes;
    total.trainable += row.trainable;
    total.buffer_bytes += row.buffer_bytes;
    modules.push_back({{"path", row.path},
                       {"type", row.type},
                       {"parameters", row.parameters},
                       {"trainable", row.trainable},
                       {"parameter_bytes", row.parameter_bytes},
                       {"buffer_bytes", row.buffer_bytes}});
  }
  json extra = json::array();
  for (auto& [name, text] : file.extra_files) extra.push_back({{"name", name}, {"bytes", text.size()}});
  if (!o.json_file.empty()) {
    write_json({{"model", o.model},
                {"rewritten", rewritten},
                {"parameters", total.parameters},
                {"trainable", total.trainable},
                {"parameter_bytes", total.parameter_bytes},
                {"buffer_bytes", total.buffer_bytes},
                {"modules", modules},
                {"methods", methods},
                {"matches", matches},
                {"extra_files", extra}},
               o.json_file, {o.model});
    if (o.json_file == "-") return kOk;
  }

  bool color = use_color(common);
  auto title = [&](const std::string& text) { print("\n" + paint(text, Color::bold, color) + "\n"); };
  print(paint(o.model, Color::bold, color) + ": " + rows[0].type + (rewritten ? ", rewritten by tsmem" : "") + "\n");
  print(fmt::format("{} parameters ({}), {} of them trainable; buffers {}\n", total.parameters,
                    bytes_text(total.parameter_bytes), total.trainable, bytes_text(total.buffer_bytes)));
  if (!file.extra_files.empty()) {
    std::vector<std::string> extras;
    for (auto& [name, text] : file.extra_files) extras.push_back(name);
    print("Extra files: " + enumerate(extras) + "\n");
  }
  title("Modules");
  std::vector<std::vector<std::string>> cells = {{"module", "type", "parameters", "trainable", "bytes"}};
  for (auto& row : rows)
    cells.push_back({row.path.empty() ? "(model)" : row.path, row.type,
                     row.parameters ? std::to_string(row.parameters) : "",
                     row.parameters ? (row.trainable == row.parameters ? "yes"
                                       : row.trainable                 ? "partly"
                                                                       : "no")
                                    : "",
                     row.parameters ? bytes_text(row.parameter_bytes) : ""});
  print(table(cells));
  for (auto& name : names) {
    title("Operators of " + name + ", with all that it calls");
    std::vector<std::pair<std::string, int>> sorted(ops[name].begin(), ops[name].end());
    std::stable_sort(sorted.begin(), sorted.end(), [](auto& x, auto& y) { return x.second > y.second; });
    cells = {{"operator", "times"}};
    for (auto& [op, n] : sorted) cells.push_back({op, std::to_string(n)});
    print(table(cells));
  }
  title(rewritten ? "What 'tsmem rewrite' would match in the originals" : "What 'tsmem rewrite' would match");
  if (matches.empty()) {
    print("nothing\n");
    return kOk;
  }
  cells = {{"pattern", "times"}};
  for (auto& [name, n] : matches) cells.push_back({name, std::to_string(n)});
  print(table(cells));
  return kOk;
}

}  // namespace

Run add_inspect(CLI::App& app, const Common& common) {
  auto o = std::make_shared<Options>();
  app.add_option("MODEL.pt", o->model, "A TorchScript file, or a program of torch.export (.pt2)")->required();
  app.add_option("--method", o->method, "This method alone")->type_name("NAME");
  add_patterns_option(app, o->patterns);
  app.add_option("--json", o->json_file, "Write what is found; '-' for standard output")->type_name("FILE");
  app.footer("Example: tsmem inspect model.pt");
  return [o, &common] { return inspect_file(*o, common); };
}

}  // namespace tsmem::cli
