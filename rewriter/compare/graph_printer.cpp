#include "rewriter/compare/graph_printer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/ir/constants.h>

#include <set>

#include "rewriter/compare/value_text.h"

namespace tsmem {

using namespace torch::jit;

std::string PrintedLine::text(const std::function<std::string(const Value*)>& name) const {
  std::string result;
  for (auto& piece : pieces)
    result +=
        std::holds_alternative<std::string>(piece) ? std::get<std::string>(piece) : name(std::get<const Value*>(piece));
  return result;
}

const Value* self_of(const Graph& graph) {
  if (graph.inputs().empty() || !graph.inputs()[0]->type()->cast<c10::ClassType>()) return nullptr;
  return graph.inputs()[0];
}

namespace {

using Nested = std::function<std::vector<std::string>(const Graph&)>;

class Printer {
 public:
  Printer(const Graph& graph, const Nested& nested) : nested_(nested) {
    find_assigned(graph.block());
    begin();
    add("(");
    for (size_t i = 0; i < graph.inputs().size(); ++i) {
      if (i) add(", ");
      define(graph.inputs()[i]);
      if (graph.inputs()[i] != self_of(graph)) add(": " + unmangled(graph.inputs()[i]->type()->annotation_str()));
    }
    add("):");
    block(graph.block(), 1);
    result("return", graph.outputs(), 1);
  }

  std::vector<PrintedLine> lines;

 private:
  void find_assigned(const Block* b) {
    for (const Node* n : b->nodes()) {
      if (n->kind() == prim::SetAttr) assigned_.insert(n->s(attr::name));
      for (const Block* inner : n->blocks()) find_assigned(inner);
    }
  }

  bool inlined(const Node* n) const {
    switch (n->kind()) {
      case prim::Constant:
        return true;
      case prim::GetAttr:
        return !assigned_.count(n->s(attr::name));  // else when it is read matters
      case prim::ListConstruct:
      case prim::TupleConstruct:
        return n->output()->uses().size() == 1;
      default:
        return false;
    }
  }

  void begin() { lines.emplace_back(); }
  void add(const std::string& text) { lines.back().pieces.push_back(text); }
  void define(const Value* v) {
    lines.back().defines.push_back(v);
    lines.back().pieces.push_back(v);
  }

  void expressions(at::ArrayRef<const Value*> values) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (i) add(", ");
      expression(values[i]);
    }
  }

  void expression(const Value* v) {
    const Node* n = v->node();
    if (n->kind() == prim::Param || !inlined(n)) {
      lines.back().pieces.push_back(v);
      return;
    }
    switch (n->kind()) {
      case prim::Constant:
        if (auto type = v->type()->cast<FunctionType>())
          return add(unmangled(type->function()->qualname().qualifiedName()));
        return add(constant_text(toIValue(v).value_or(c10::IValue())));
      case prim::GetAttr:
        expression(n->input());
        return add("." + n->s(attr::name));
      default: {
        bool list = n->kind() == prim::ListConstruct;
        add(list ? "[" : "(");
        expressions(n->inputs());
        add(list ? "]" : n->inputs().size() == 1 ? ",)" : ")");
      }
    }
  }

  void result(const std::string& word, at::ArrayRef<const Value*> values, int depth) {
    begin();
    add(std::string(2 * depth, ' ') + word + (values.empty() ? "" : " "));
    expressions(values);
  }

  void block(const Block* b, int depth) {
    for (const Node* n : b->nodes())
      if (!inlined(n)) node(n, depth);
  }

  void attributes(const Node* n) {
    auto names = n->attributeNames();
    // A number that LibTorch gives to each warning as it loads it, and what a node remembers of the program that it was
    // read from.
    std::erase_if(names, [](Symbol name) {
      return name == attr::warn_id || std::string_view(name.toUnqualString()).starts_with("tsmem_");
    });
    if (names.empty()) return;
    add("[");
    for (size_t i = 0; i < names.size(); ++i) {
      add((i ? ", " : "") + std::string(names[i].toUnqualString()) + "=");
      switch (n->kindOf(names[i])) {
        case AttributeKind::i:
          add(fmt::format("{}", n->i(names[i])));
          break;
        case AttributeKind::f:
          add(real_text(n->f(names[i])));
          break;
        case AttributeKind::s:
          add(constant_text(n->s(names[i])));
          break;
        case AttributeKind::is:
          add(c10::str(at::IntArrayRef(n->is(names[i]))));
          break;
        case AttributeKind::ss:
          add(fmt::format("[{}]", fmt::join(n->ss(names[i]), ", ")));
          break;
        case AttributeKind::t:
          add(tensor_text(n->t(names[i])));
          break;
        case AttributeKind::ival:
          add(constant_text(n->ival(names[i])));
          break;
        case AttributeKind::ty:
          add(unmangled(n->ty(names[i])->annotation_str()));
          break;
        case AttributeKind::g:
          add("{" + fmt::format("{}", fmt::join(nested_(*n->g(names[i])), "; ")) + "}");
          break;
        default:
          add("...");
          break;
      }
    }
    add("]");
  }

  void node(const Node* n, int depth) {
    const std::string indent(2 * depth, ' ');
    begin();
    add(indent);
    for (size_t i = 0; i < n->outputs().size(); ++i) {
      if (i) add(", ");
      define(n->outputs()[i]);
    }
    if (!n->outputs().empty()) add(" = ");
    auto call = [&](size_t first) {
      add("(");
      expressions(n->inputs().slice(first));
      add(")");
    };
    switch (n->kind()) {
      case prim::CallMethod:
        expression(n->input(0));
        if (n->s(attr::name) != "forward") add("." + n->s(attr::name));
        return call(1);
      case prim::CallFunction:
        expression(n->input(0));
        return call(1);
      case prim::SetAttr:
        expression(n->input(0));
        add("." + n->s(attr::name) + " = ");
        return expression(n->input(1));
      case prim::GetAttr:
        expression(n->input(0));
        return add("." + n->s(attr::name));
      case prim::If:
        add("if ");
        expression(n->input(0));
        add(":");
        for (size_t i = 0; i < n->blocks().size(); ++i) {
          const Block* branch = n->blocks()[i];
          bool empty = branch->outputs().empty();
          for (const Node* inner : branch->nodes()) empty &= inlined(inner);
          if (i == 1) {
            if (empty) break;
            begin();
            add(indent + "else:");
          }
          block(branch, depth + 1);
          if (!branch->outputs().empty()) result("->", branch->outputs(), depth + 1);
        }
        return;
      case prim::Loop:
        add("loop");
        call(0);
        add(":");
        begin();
        add(indent + "  each ");
        for (size_t i = 0; i < n->blocks()[0]->inputs().size(); ++i) {
          if (i) add(", ");
          define(n->blocks()[0]->inputs()[i]);
        }
        add(":");
        block(n->blocks()[0], depth + 2);
        return result("->", n->blocks()[0]->outputs(), depth + 2);
      default:
        add(n->kind().toQualString());
        attributes(n);
        call(0);
        for (const Block* inner : n->blocks()) {
          block(inner, depth + 1);
          result("->", inner->outputs(), depth + 1);
        }
    }
  }

  const Nested& nested_;
  std::set<std::string> assigned_;
};

}  // namespace

std::vector<PrintedLine> printed(const Graph& graph, const Nested& nested) { return Printer(graph, nested).lines; }

}  // namespace tsmem
