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
#include "rewriter/error.h"
#include "rewriter/file/model_file.h"
#include "rewriter/rewrite/added_names.h"
#include "rewriter/rewrite/rewrite.h"

namespace tsmem::cli {
namespace {

using nlohmann::json;
using torch::jit::Module;

struct InspectArguments {
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

// What a model holds, and what would be rewritten in it.
struct Inspection {
  std::vector<Row> modules;
  Row total;
  std::vector<std::string> methods;                         // those that are shown
  std::map<std::string, std::string> schemas;               // of each
  std::map<std::string, std::map<std::string, int>> ops;    // of each: operator -> times
  std::map<std::string, size_t> matches;                    // pattern -> times
  std::vector<std::pair<std::string, size_t>> extra_files;  // with their bytes
  bool rewritten = false;
};

// The methods to show: those of the model's own, or the one that is asked for.
std::vector<std::string> shown_methods(const Module& module, const std::string& asked) {
  std::vector<std::string> names, all_names;
  for (const auto& method : module.get_methods()) {
    all_names.push_back(method.name());
    if (!is_added_name(method.name())) names.push_back(method.name());
  }
  if (asked.empty()) return names;
  if (std::find(all_names.begin(), all_names.end(), asked) == all_names.end())
    throw Error(ErrorKind::request, "The model has no method '" + asked + "'" + did_you_mean(asked, names) + ".");
  return {asked};
}

Inspection inspect(const InspectArguments& o) {
  RewriteOptions options;
  options.patterns = read_patterns(o.patterns);
  auto file = load_model(o.model, "meta");  // names and shapes are enough
  Inspection found;
  found.methods = shown_methods(file.module, o.method);
  found.modules = module_rows(file.module);
  for (const Row& row : found.modules) {
    found.total.parameters += row.parameters;
    found.total.parameter_bytes += row.parameter_bytes;
    found.total.trainable += row.trainable;
    found.total.buffer_bytes += row.buffer_bytes;
  }
  for (const auto& name : found.methods) {
    found.ops[name] = op_counts(file.module, name);
    found.schemas[name] = c10::str(file.module.get_method(name).function().getSchema());
  }
  for (const auto& [name, text] : file.extra_files) found.extra_files.emplace_back(name, text.size());
  found.rewritten = is_rewritten(file.module);
  if (found.rewritten) restore(file.module);  // what would match is a question about the originals
  options.method = is_added_name(o.method) ? "" : o.method;
  for (const auto& match : rewrite(file.module, options, true).matches) ++found.matches[match.pattern];
  return found;
}

json to_json(const Inspection& found, const std::string& model) {
  json modules = json::array(), methods = json::array(), extra = json::array();
  for (const Row& row : found.modules)
    modules.push_back({{"path", row.path},
                       {"type", row.type},
                       {"parameters", row.parameters},
                       {"trainable", row.trainable},
                       {"parameter_bytes", row.parameter_bytes},
                       {"buffer_bytes", row.buffer_bytes}});
  for (const auto& name : found.methods)
    methods.push_back({{"name", name}, {"schema", found.schemas.at(name)}, {"ops", found.ops.at(name)}});
  for (const auto& [name, bytes] : found.extra_files) extra.push_back({{"name", name}, {"bytes", bytes}});
  return {{"model", model},
          {"rewritten", found.rewritten},
          {"parameters", found.total.parameters},
          {"trainable", found.total.trainable},
          {"parameter_bytes", found.total.parameter_bytes},
          {"buffer_bytes", found.total.buffer_bytes},
          {"modules", modules},
          {"methods", methods},
          {"matches", found.matches},
          {"extra_files", extra}};
}

void print_modules(const std::vector<Row>& modules) {
  std::vector<std::vector<std::string>> cells = {{"module", "type", "parameters", "trainable", "bytes"}};
  for (const Row& row : modules)
    cells.push_back({row.path.empty() ? "(model)" : row.path, row.type,
                     row.parameters ? std::to_string(row.parameters) : "",
                     row.parameters ? (row.trainable == row.parameters ? "yes"
                                       : row.trainable                 ? "partly"
                                                                       : "no")
                                    : "",
                     row.parameters ? bytes_text(row.parameter_bytes) : ""});
  print(table(cells));
}

// Names and how often each is there, in the order given.
template <class Counts>
void print_counts(const std::string& what, const Counts& counts) {
  std::vector<std::vector<std::string>> cells = {{what, "times"}};
  for (const auto& [name, n] : counts) cells.push_back({name, std::to_string(n)});
  print(table(cells));
}

void print_inspection(const Inspection& found, const std::string& model, bool color) {
  const auto title = [&](const std::string& text) { print("\n" + paint(text, Color::bold, color) + "\n"); };
  print(paint(model, Color::bold, color) + ": " + found.modules[0].type +
        (found.rewritten ? ", rewritten by tsmem" : "") + "\n");
  print(fmt::format("{} parameters ({}), {} of them trainable; buffers {}\n", found.total.parameters,
                    bytes_text(found.total.parameter_bytes), found.total.trainable,
                    bytes_text(found.total.buffer_bytes)));
  std::vector<std::string> extras;
  for (const auto& [name, bytes] : found.extra_files) extras.push_back(name);
  if (!extras.empty()) print("Extra files: " + enumerate(extras) + "\n");
  title("Modules");
  print_modules(found.modules);
  for (const auto& name : found.methods) {
    title("Operators of " + name + ", with all that it calls");
    const auto& ops = found.ops.at(name);
    std::vector<std::pair<std::string, int>> sorted(ops.begin(), ops.end());
    std::stable_sort(sorted.begin(), sorted.end(), [](auto& x, auto& y) { return x.second > y.second; });
    print_counts("operator", sorted);
  }
  title(found.rewritten ? "What 'tsmem rewrite' would match in the originals" : "What 'tsmem rewrite' would match");
  if (found.matches.empty())
    print("nothing\n");
  else
    print_counts("pattern", found.matches);
}

int inspect_file(const InspectArguments& o, const Common& common) {
  const Inspection found = inspect(o);
  if (!o.json_file.empty()) write_json(to_json(found, o.model), o.json_file, {o.model});
  if (o.json_file != "-") print_inspection(found, o.model, use_color(common));
  return kOk;
}

}  // namespace

Run add_inspect(CLI::App& app, const Common& common) {
  auto o = std::make_shared<InspectArguments>();
  app.add_option("MODEL.pt", o->model, "A TorchScript file, or a program of torch.export (.pt2)")->required();
  app.add_option("--method", o->method, "This method alone")->type_name("NAME");
  add_patterns_option(app, o->patterns);
  app.add_option("--json", o->json_file, "Write what is found; '-' for standard output")->type_name("FILE");
  app.footer("Example: tsmem inspect model.pt");
  return [o, &common] { return inspect_file(*o, common); };
}

}  // namespace tsmem::cli
