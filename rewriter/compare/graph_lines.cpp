#include "rewriter/compare/graph_lines.h"

#include <fmt/format.h>

#include <cctype>
#include <unordered_map>

#include "rewriter/compare/alignment.h"
#include "rewriter/compare/graph_printer.h"
#include "rewriter/method_call.h"

namespace tsmem {

using namespace torch::jit;

namespace {

// A name to start from: the source's own where it has one, else what computes the value.
std::string stem(const Value* v) {
  if (v->hasDebugName()) {
    auto name = v->debugName();
    name = name.substr(0, name.find('.'));
    while (!name.empty() && std::isdigit(static_cast<unsigned char>(name.back()))) name.pop_back();
    if (!name.empty() && name[0] != '_') return name;
  }
  const Node* n = v->node();
  if (n->kind() == prim::CallMethod && n->input(0)->node()->kind() == prim::GetAttr) {
    auto name = n->input(0)->node()->s(attr::name);
    return std::isdigit(static_cast<unsigned char>(name[0])) ? "y" + name : name;
  }
  if (auto function = called_function(n)) return function->name();
  if (n->kind() == prim::Param) return "i";
  std::string name = n->kind().toUnqualString();
  while (name.ends_with('_')) name.pop_back();
  return name.empty() ? "v" : name;
}

using Names = std::unordered_map<const Value*, std::string>;
using Taken = std::unordered_map<std::string, int>;  // the names that are taken, and the number to try next for each

void give_name(const Value* v, const std::string& name, Names& names, Taken& taken) {
  std::string unique = name;
  while (!taken.emplace(unique, 2).second) unique = fmt::format("{}_{}", name, taken[name]++);
  names[v] = unique;
}

std::vector<std::string> texts(const std::vector<PrintedLine>& lines, const Names& names) {
  std::vector<std::string> result;
  auto name = [&](const Value* v) {
    auto it = names.find(v);
    return it == names.end() ? std::string("%?") : it->second;
  };
  for (auto& line : lines) result.push_back(line.text(name));
  return result;
}

void name_all(const Graph& graph, const std::vector<PrintedLine>& lines, Names& names, Taken& taken) {
  for (auto& line : lines)
    for (auto v : line.defines)
      if (!names.count(v)) give_name(v, v == self_of(graph) ? "self" : "%" + stem(v), names, taken);
}

std::vector<PrintedLine> printed_graph(const Graph& graph) {
  return printed(graph, [](const Graph& nested) { return graph_lines(nested); });
}

std::vector<std::string> without_names(const std::vector<PrintedLine>& lines) {
  std::vector<std::string> result;
  for (auto& line : lines) result.push_back(line.text([](const Value*) { return "%"; }));
  return result;
}

}  // namespace

LinesOfBoth graph_lines(const Graph& a, const Graph& b) {
  const auto lines_a = printed_graph(a), lines_b = printed_graph(b);
  Names names_a, names_b;
  Taken taken;
  name_all(a, lines_a, names_a, taken);
  // The first line has the inputs, which correspond whatever their types.
  for (size_t i = 0; i < std::min(a.inputs().size(), b.inputs().size()); ++i)
    names_b[b.inputs()[i]] = names_a[a.inputs()[i]];
  size_t i = 0, j = 0;
  const PrintedLine *removed = nullptr, *added = nullptr;  // the last ones since the lines last agreed
  auto correspond = [&](const PrintedLine& x, const PrintedLine& y) {
    for (size_t k = 0; k < x.defines.size(); ++k) names_b.emplace(y.defines[k], names_a[x.defines[k]]);
  };
  // What replaces something else takes its results' names, so that the lines that use them stay the same.
  auto replaced = [&] {
    if (removed && added && removed->defines.size() == added->defines.size()) correspond(*removed, *added);
    removed = added = nullptr;
  };
  for (const Edit edit : align(without_names(lines_a), without_names(lines_b))) {
    if (edit == Edit::common) {
      replaced();
      correspond(lines_a[i++], lines_b[j++]);
    } else if (edit == Edit::removed) {
      removed = &lines_a[i++];
    } else {
      added = &lines_b[j++];
    }
  }
  replaced();
  name_all(b, lines_b, names_b, taken);
  return {texts(lines_a, names_a), texts(lines_b, names_b)};
}

std::vector<std::string> graph_lines(const Graph& graph) {
  const auto lines = printed_graph(graph);
  Names names;
  Taken taken;
  name_all(graph, lines, names, taken);
  return texts(lines, names);
}

}  // namespace tsmem
