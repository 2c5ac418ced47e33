#include "rewriter/diff.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/function_impl.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <variant>

#include "ops/traits.h"
#include "rewriter/alignment.h"
#include "rewriter/error.h"
#include "rewriter/text.h"

namespace tsmem {

using namespace torch::jit;

namespace {

const std::string kPrefix = "_tsmem_";

// "__torch__.torch.nn.modules.conv.___torch_mangle_3.Conv2d" -> "torch.nn.modules.conv.Conv2d": the numbers are given
// anew at each load.
std::string unmangled(std::string name) {
  for (size_t at; (at = name.find("___torch_mangle_")) != name.npos;) {
    size_t dot = name.find('.', at);
    name.erase(at, dot == name.npos ? name.npos : dot + 1 - at);
  }
  for (size_t at; (at = name.find("__torch__.")) != name.npos;) name.erase(at, 10);
  return name;
}

std::string short_name(const c10::ClassType& type) { return type.name()->name(); }

std::string real(double value) {
  auto text = fmt::format("{}", value);
  return text.find_first_not_of("-0123456789") == text.npos ? text + ".0" : text;
}

// A tensor's values where they are few, else a checksum of its bytes.
std::string tensor_text(const at::Tensor& t) {
  if (!t.defined()) return "Tensor()";
  std::string text = fmt::format("Tensor({}{}", c10::toString(t.scalar_type()), c10::str(t.sizes()));
  if (t.is_meta() || t.layout() != c10::kStrided || t.is_quantized()) return text + ")";
  auto plain = t.detach().cpu().contiguous();
  if (plain.numel() <= 8 && !plain.is_complex()) {
    auto values = plain.to(at::kDouble);
    for (int64_t i = 0; i < values.numel(); ++i)
      text += (i ? ", " : ": ") + fmt::format("{}", values.data_ptr<double>()[i]);
    return text + ")";
  }
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  auto bytes = static_cast<const unsigned char*>(plain.data_ptr());
  for (size_t i = 0; i < plain.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  return fmt::format("{}, #{:016x})", text, hash);
}

std::string constant_text(const c10::IValue& value) {
  auto sequence = [](const auto& items, char open, char close) {
    std::string text(1, open);
    bool first = true;
    for (const c10::IValue& item : items) {
      text += (first ? "" : ", ") + constant_text(item);
      first = false;
    }
    return text + close;
  };
  if (value.isNone()) return "None";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isDouble()) return real(value.toDouble());
  if (value.isTensor()) return tensor_text(value.toTensor());
  if (value.isString())
    return nlohmann::json(value.toStringRef()).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (value.isList()) return sequence(value.toListRef(), '[', ']');
  if (value.isTuple()) return sequence(value.toTupleRef().elements(), '(', ')');
  if (value.isObject()) return unmangled(value.type()->annotation_str());
  return unmangled(c10::str(value));
}

// What a prim::CallFunction calls, null for anything else.
Function* called_function(const Node* n) {
  if (n->kind() != prim::CallFunction) return nullptr;
  auto type = n->input(0)->type()->cast<FunctionType>();
  return type ? type->function() : nullptr;
}

std::string called_method_class(const Node* call) {
  auto type = call->input(0)->type()->cast<c10::NamedType>();
  return type && type->name() ? type->name()->name() : "";
}

// A line of a graph: text with values in it that get their names later.
struct Line {
  std::vector<std::variant<std::string, const Value*>> pieces;
  std::vector<const Value*> defines;

  std::string text(const std::function<std::string(const Value*)>& name) const {
    std::string result;
    for (auto& piece : pieces)
      result += std::holds_alternative<std::string>(piece) ? std::get<std::string>(piece)
                                                           : name(std::get<const Value*>(piece));
    return result;
  }
};

// A graph as lines that read like code: constants, attributes and lists of them stand where they are used.
class Printer {
 public:
  explicit Printer(const Graph& graph) : graph_(graph) {
    find_assigned(graph.block());
    begin();
    add("(");
    for (size_t i = 0; i < graph.inputs().size(); ++i) {
      if (i) add(", ");
      define(graph.inputs()[i]);
      if (!is_self(graph.inputs()[i])) add(": " + unmangled(graph.inputs()[i]->type()->annotation_str()));
    }
    add("):");
    block(graph.block(), 1);
    result("return", graph.outputs(), 1);
  }

  bool is_self(const Value* v) const {
    return !graph_.inputs().empty() && v == graph_.inputs()[0] && v->type()->cast<c10::ClassType>();
  }

  std::vector<Line> lines;

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
    // A number that LibTorch gives to each warning as it loads it.
    std::erase_if(names, [](Symbol name) { return name == attr::warn_id; });
    if (names.empty()) return;
    add("[");
    for (size_t i = 0; i < names.size(); ++i) {
      add((i ? ", " : "") + std::string(names[i].toUnqualString()) + "=");
      switch (n->kindOf(names[i])) {
        case AttributeKind::i:
          add(fmt::format("{}", n->i(names[i])));
          break;
        case AttributeKind::f:
          add(real(n->f(names[i])));
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
          add("{" + fmt::format("{}", fmt::join(graph_lines(*n->g(names[i])), "; ")) + "}");
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

  const Graph& graph_;
  std::set<std::string> assigned_;
};

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

std::vector<std::string> texts(const std::vector<Line>& lines, const Names& names) {
  std::vector<std::string> result;
  auto name = [&](const Value* v) {
    auto it = names.find(v);
    return it == names.end() ? std::string("%?") : it->second;
  };
  for (auto& line : lines) result.push_back(line.text(name));
  return result;
}

void name_all(const Printer& printer, Names& names, Taken& taken) {
  for (auto& line : printer.lines)
    for (auto v : line.defines)
      if (!names.count(v)) give_name(v, printer.is_self(v) ? "self" : "%" + stem(v), names, taken);
}

// Both graphs' lines. Values of `b` have the names of those of `a` that their lines correspond to, so that only real
// changes differ.
void compare_graphs(const Graph& a, const Graph& b, MethodDiff& d) {
  Printer pa(a), pb(b);
  Names names_a, names_b;
  Taken taken;
  name_all(pa, names_a, taken);
  // The first line has the inputs, which correspond whatever their types.
  for (size_t i = 0; i < std::min(a.inputs().size(), b.inputs().size()); ++i)
    names_b[b.inputs()[i]] = names_a[a.inputs()[i]];
  auto keys = [](const std::vector<Line>& lines) {
    std::vector<std::string> result;
    for (auto& line : lines) result.push_back(line.text([](const Value*) { return "%"; }));
    return result;
  };
  size_t i = 0, j = 0;
  const Line *removed = nullptr, *added = nullptr;  // the last ones since the lines last agreed
  auto correspond = [&](const Line& x, const Line& y) {
    for (size_t k = 0; k < x.defines.size(); ++k) names_b.emplace(y.defines[k], names_a[x.defines[k]]);
  };
  // What replaces something else takes its results' names, so that the lines that use them stay the same.
  auto replaced = [&] {
    if (removed && added && removed->defines.size() == added->defines.size()) correspond(*removed, *added);
    removed = added = nullptr;
  };
  for (const Edit edit : align(keys(pa.lines), keys(pb.lines))) {
    if (edit == Edit::common) {
      replaced();
      correspond(pa.lines[i++], pb.lines[j++]);
    } else if (edit == Edit::removed) {
      removed = &pa.lines[i++];
    } else {
      added = &pb.lines[j++];
    }
  }
  replaced();
  name_all(pb, names_b, taken);
  d.a = texts(pa.lines, names_a);
  d.b = texts(pb.lines, names_b);
}

const Graph* graph_of(Function* f) {
  auto g = f ? tryToGraphFunction(*f) : nullptr;
  return g ? g->graph().get() : nullptr;
}

// The method that tsmem::checkpoint or tsmem::autocast calls; null for other nodes.
Function* method_called_by_op(const Node* n) {
  if (!traits_of(n->kind().toQualString()).calls_method) return nullptr;
  auto type = n->input(0)->type()->cast<c10::ClassType>();
  auto name = toIValue(n->input(1));
  return type && name ? type->findMethod(name->toStringRef()) : nullptr;
}

// The call under autocast that is all of a method written by write_autocast(), else null.
const Node* autocast_call(const Graph* graph) {
  if (graph)
    for (const Node* n : graph->nodes())
      if (n->kind() == Symbol::fromQualString("tsmem::autocast") && toIValue(n->input(3)) &&
          graph_of(method_called_by_op(n)))
        return n;
  return nullptr;
}

// Operators, and calls with what they call, however deep in branches; what only moves values about is left out, and so
// are branches that a call's constant arguments rule out.
struct Ops {
  using Known = std::unordered_map<const Value*, bool>;
  struct Call {
    Function* function;  // null where it isn't known before run time
    Known known;         // the callee's inputs that are constant here
  };
  std::map<std::string, int> ops;
  std::set<std::string> on_tensors;  // those with a tensor among their results
  std::map<std::string, std::vector<Call>> calls;

  static std::optional<bool> constant(const Value* v, const Known& known) {
    if (auto it = known.find(v); it != known.end()) return it->second;
    auto value = toIValue(v);
    return value && value->isBool() ? std::optional(value->toBool()) : std::nullopt;
  }

  void call(const std::string& name, Function* f, at::ArrayRef<const Value*> arguments, const Known& known) {
    Call c{f, {}};
    if (auto g = graph_of(f))
      for (size_t i = 0; i < std::min(arguments.size(), g->inputs().size()); ++i)
        if (auto value = constant(arguments[i], known)) c.known[g->inputs()[i]] = *value;
    calls[name].push_back(std::move(c));
  }

  void add(const Block* b, const Known& known = {}) {
    for (const Node* n : b->nodes()) {
      if (n->kind() == prim::CallMethod) {
        auto type = n->input(0)->type()->cast<c10::ClassType>();  // else an interface
        call(called_method_class(n) + "." + n->s(attr::name), type ? type->findMethod(n->s(attr::name)) : nullptr,
             n->inputs(), known);
      } else if (auto function = called_function(n)) {
        call(function->name(), function, n->inputs().slice(1), known);
      } else if (!n->kind().is_prim()) {
        const std::string name = n->kind().toQualString();
        ++ops[name];
        for (const Value* out : n->outputs())
          if (out->type()->isSubtypeOf(*c10::OptionalType::ofTensor())) on_tensors.insert(name);
        if (Function* method = method_called_by_op(n)) {
          on_tensors.insert(name);
          call(called_method_class(n) + "." + method->name(), method, {}, known);
        }
      }
      auto decided = n->kind() == prim::If ? constant(n->input(0), known) : std::nullopt;
      for (size_t i = 0; i < n->blocks().size(); ++i)
        if (!decided || *decided == (i == 0)) add(n->blocks()[i], known);
    }
  }

  // Puts a call's contents in its place.
  void expand(const std::string& name) {
    Call c = std::move(calls[name].back());
    calls[name].pop_back();
    if (auto g = graph_of(c.function))
      add(g->block(), c.known);
    else
      ++ops["call " + name];
  }
};

// What `a` has more of, and `b`. Of calls that only one has, the contents count: a call that was replaced by the
// operators that it makes is no change.
void compare_ops(Ops a, Ops b, MethodDiff& d) {
  std::set<std::string> names;
  for (bool again = true; again;) {
    again = false;
    names.clear();
    for (auto side : {&a, &b})
      for (auto& [name, functions] : side->calls) names.insert(name);
    for (auto& name : names)
      while (a.calls[name].size() != b.calls[name].size()) {
        (a.calls[name].size() > b.calls[name].size() ? a : b).expand(name);
        again = true;
      }
  }
  d.on_tensors = a.on_tensors;
  d.on_tensors.insert(b.on_tensors.begin(), b.on_tensors.end());
  for (auto& [op, n] : a.ops)
    if (int less = n - b.ops[op]; less > 0) d.removed_ops[op] = less;
  for (auto& [op, n] : b.ops)
    if (int more = n - a.ops[op]; more > 0) d.added_ops[op] = more;
}

// One method's comparison; either may be missing.
MethodDiff compare(Function* a, Function* b, const std::string& name) {
  MethodDiff d;
  d.method = name;
  const Graph *ga = graph_of(a), *gb = graph_of(b);
  if (ga && gb) {
    // A method under autocast reads as its body, below a line that says so.
    const Node *amp_a = autocast_call(ga), *amp_b = autocast_call(gb);
    const auto body = [](const Graph* g, const Node* call) { return call ? graph_of(method_called_by_op(call)) : g; };
    const auto heading = [](const Node* call, std::vector<std::string>& lines) {
      if (call) lines.insert(lines.begin(), "under autocast to " + toIValue(call->input(3))->toStringRef() + ":");
    };
    compare_graphs(*body(ga, amp_a), *body(gb, amp_b), d);
    heading(amp_a, d.a);
    heading(amp_b, d.b);
    d.status = d.a == d.b ? "same" : "changed";
  } else {
    d.status = ga ? "removed" : gb ? "added" : "same";
    if (ga) d.a = graph_lines(*ga);
    if (gb) d.b = graph_lines(*gb);
  }
  Ops ops_a, ops_b;
  if (ga) ops_a.add(ga->block());
  if (gb) ops_b.add(gb->block());
  if (d.status != "same") compare_ops(std::move(ops_a), std::move(ops_b), d);
  return d;
}

std::vector<Function*> functions_of(const c10::ClassType* type) {
  std::vector<Function*> all;
  if (!type) return all;
  all = type->methods();
  for (auto hooks : {&type->getForwardPreHooks(), &type->getForwardHooks()})
    all.insert(all.end(), hooks->begin(), hooks->end());
  return all;
}

std::vector<std::string> attribute_lines(const c10::ClassType& type) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < type.numAttributes(); ++i) {
    std::string kind = type.is_parameter(i) ? " (parameter)" : type.is_buffer(i) ? " (buffer)" : "";
    auto class_type = type.getAttribute(i)->cast<c10::ClassType>();
    // A submodule of another class is compared as that, where it stands.
    std::string what =
        class_type && class_type->is_module() ? "module" : unmangled(type.getAttribute(i)->annotation_str());
    lines.push_back(type.getAttributeName(i) + ": " + what + kind);
  }
  for (size_t i = 0; i < type.numConstants(); ++i)
    lines.push_back(type.getConstantName(i) + " = " + constant_text(type.getConstant(i)));
  return lines;
}

// Functions that the methods call, at any depth, by name; several of one name in the order in which they are met.
using Functions = std::map<std::string, std::vector<Function*>>;
void collect_functions(const Block* b, Functions& functions, std::unordered_set<Function*>& seen) {
  for (const Node* n : b->nodes()) {
    if (Function* f = called_function(n); f && seen.insert(f).second)
      if (const Graph* g = graph_of(f)) {
        functions[unmangled(f->qualname().qualifiedName())].push_back(f);
        collect_functions(g->block(), functions, seen);
      }
    for (const Block* inner : n->blocks()) collect_functions(inner, functions, seen);
  }
}

struct Pair {  // classes that stand at the same places of the two trees; one may be missing
  const c10::ClassType *a, *b;
  std::vector<std::string> paths;
};

std::vector<Pair> pair_classes(const Module& a, const Module& b) {
  std::vector<Pair> pairs;
  std::map<std::pair<const c10::ClassType*, const c10::ClassType*>, size_t> index;
  std::function<void(const Module*, const Module*, const std::string&)> walk = [&](const Module* x, const Module* y,
                                                                                   const std::string& path) {
    auto tx = x ? x->type().get() : nullptr, ty = y ? y->type().get() : nullptr;
    auto [it, is_new] = index.emplace(std::make_pair(tx, ty), pairs.size());
    if (is_new) pairs.push_back({tx, ty, {}});
    pairs[it->second].paths.push_back(path);
    std::map<std::string, Module> in_b;
    std::vector<std::string> names_b;
    if (y)
      for (const auto& child : y->named_children()) {
        in_b.emplace(child.name, child.value);
        names_b.push_back(child.name);
      }
    auto inner = [&](const std::string& name) { return path.empty() ? name : path + "." + name; };
    if (x)
      for (const auto& child : x->named_children()) {
        auto other = in_b.find(child.name);
        walk(&child.value, other == in_b.end() ? nullptr : &other->second, inner(child.name));
        if (other != in_b.end()) in_b.erase(other);
      }
    for (auto& name : names_b)
      if (auto it = in_b.find(name); it != in_b.end()) walk(nullptr, &it->second, inner(name));
  };
  walk(&a, &b, "");
  return pairs;
}

std::string where(const MethodDiff& d) {
  std::string text = d.path.empty() ? "(model)" : d.path;
  if (d.instances.size() > 1) text += fmt::format(" (and {} more)", d.instances.size() - 1);
  return text;
}

std::string ops_text(const std::map<std::string, int>& ops) {
  std::string text;
  for (auto& [op, n] : ops) text += (text.empty() ? "" : ", ") + op + (n > 1 ? fmt::format(" x{}", n) : "");
  return text;
}

std::string painted(const std::string& text, const char* code, bool color) {
  return color ? "\033[" + std::string(code) + "m" + text + "\033[0m" : text;
}

}  // namespace

std::vector<Row> side_by_side(const MethodDiff& d) {
  std::vector<Row> rows;
  size_t a = 0, b = 0, went = 0, came = 0;  // lines so far; rows of the change under way
  const auto row = [&](size_t& of_side) -> Row& {
    const size_t change = std::max(went, came);
    if (of_side++ == change) rows.emplace_back();
    return rows[rows.size() - std::max(went, came) + of_side - 1];
  };
  for (const Edit edit : align(d.a, d.b)) {
    if (edit == Edit::common) {
      went = came = 0;
      rows.push_back({a++, b++});
    } else if (edit == Edit::removed) {
      row(went).a = a++;
    } else {
      row(came).b = b++;
    }
  }
  return rows;
}

namespace {

std::string hunks_text(const MethodDiff& d, bool color) {
  const auto edits = align(d.a, d.b);
  std::string text;
  for (const Hunk& hunk : hunks(edits)) {
    text += painted(fmt::format("@@ -{},{} +{},{} @@", hunk.a, hunk.a_count, hunk.b, hunk.b_count), "36", color) + "\n";
    size_t a = hunk.a - 1, b = hunk.b - 1;
    for (size_t i = hunk.begin; i < hunk.end; ++i) {
      if (edits[i] == Edit::added) {
        text += painted("+" + d.b[b++], "32", color) + "\n";
        continue;
      }
      const auto& line = d.a[a++];
      text += (edits[i] == Edit::removed ? painted("-" + line, "31", color) : " " + line) + "\n";
      b += edits[i] == Edit::common;
    }
  }
  return text;
}

}  // namespace

std::vector<std::string> graph_lines(const Graph& graph) {
  Printer printer(graph);
  Names names;
  Taken taken;
  name_all(printer, names, taken);
  return texts(printer.lines, names);
}

std::vector<MethodDiff> diff(const Module& a, const Module& b, const std::string& method) {
  std::vector<MethodDiff> result;
  std::set<std::string> known;
  Functions functions_a, functions_b;
  std::unordered_set<Function*> seen_a, seen_b;
  auto wanted = [&](const std::string& name) { return method.empty() ? !name.starts_with(kPrefix) : name == method; };
  for (const Pair& pair : pair_classes(a, b)) {
    auto put = [&](MethodDiff d) {
      d.path = pair.paths[0];
      d.instances = pair.paths;
      d.type = short_name(pair.a ? *pair.a : *pair.b);
      result.push_back(std::move(d));
    };
    if (method.empty() && pair.a && pair.b) {
      MethodDiff d;
      d.method = "(attributes)";
      d.status = "changed";
      d.a = attribute_lines(*pair.a);
      d.b = attribute_lines(*pair.b);
      if (d.a != d.b) put(std::move(d));
    }
    std::map<std::string, Function*> in_b;
    for (Function* f : functions_of(pair.b)) {
      known.insert(f->name());
      if (wanted(f->name())) in_b[f->name()] = f;
    }
    for (Function* f : functions_of(pair.a)) {
      known.insert(f->name());
      if (!wanted(f->name())) continue;
      auto other = in_b.find(f->name());
      put(compare(f, other == in_b.end() ? nullptr : other->second, f->name()));
      if (other != in_b.end()) in_b.erase(other);
      if (auto g = graph_of(f)) collect_functions(g->block(), functions_a, seen_a);
    }
    for (Function* f : functions_of(pair.b)) {
      if (in_b.count(f->name())) put(compare(nullptr, f, f->name()));
      if (auto g = graph_of(f); g && wanted(f->name())) collect_functions(g->block(), functions_b, seen_b);
    }
  }
  if (!method.empty() && !known.count(method)) {
    auto near = nearest(method, {known.begin(), known.end()});
    throw Error(kUsage, "Neither model has a method '" + method + "'" +
                            (near.empty() ? "" : " (did you mean '" + near + "'?)") + ".");
  }
  for (auto& [name, fa] : functions_a) {
    auto it = functions_b.find(name);
    if (it == functions_b.end()) continue;  // no longer called: the callers differ
    for (size_t i = 0; i < std::max(fa.size(), it->second.size()); ++i) {
      auto d = compare(fa[std::min(i, fa.size() - 1)], it->second[std::min(i, it->second.size() - 1)], "");
      if (d.status == "same") continue;
      auto dot = name.rfind('.');
      d.path = dot == name.npos ? "" : name.substr(0, dot);
      d.method = dot == name.npos ? name : name.substr(dot + 1);
      d.instances = {d.path};
      d.type = "function";
      result.push_back(std::move(d));
    }
  }
  return result;
}

size_t kept_methods(const Module& module) {
  std::unordered_set<const c10::ClassType*> seen;
  size_t n = 0;
  for (const auto& m : module.modules())
    if (seen.insert(m.type().get()).second)
      for (Function* f : m.type()->methods()) n += f->name().starts_with(kPrefix);
  return n;
}

MethodDiff total_difference(const Module& a, const Module& b, const std::string& method) {
  MethodDiff d;
  d.method = method;
  auto all = [&](const Module& m) {
    Ops ops;
    if (auto found = m.find_method(method))
      if (auto g = graph_of(&found->function())) ops.add(g->block());
    for (bool again = true; again;) {
      again = false;
      std::vector<std::string> names;
      for (auto& [name, found] : ops.calls)
        for (size_t i = 0; i < found.size(); ++i) names.push_back(name);
      for (auto& name : names) ops.expand(name);
      again = !names.empty();
    }
    return ops;
  };
  compare_ops(all(a), all(b), d);
  d.status = d.removed_ops.empty() && d.added_ops.empty() ? "same" : "changed";
  return d;
}

ChangedOps changed_ops(const MethodDiff& d) {
  // Arithmetic on sizes and checks of arguments would drown the rest.
  auto on_tensors = [&](const std::map<std::string, int>& ops) {
    std::map<std::string, int> result;
    for (auto& op : ops)
      if (d.on_tensors.count(op.first)) result.insert(op);
    return result;
  };
  ChangedOps ops{on_tensors(d.removed_ops), on_tensors(d.added_ops)};
  if (ops.removed.empty() && ops.added.empty()) return {d.removed_ops, d.added_ops};
  return ops;
}

std::string ops_lines(const MethodDiff& d, bool color) {
  const auto [removed, added] = changed_ops(d);
  std::string text;
  if (!removed.empty()) text += painted("  - " + ops_text(removed), "31", color) + "\n";
  if (!added.empty()) text += painted("  + " + ops_text(added), "32", color) + "\n";
  return text;
}

std::string render_text(const std::vector<MethodDiff>& d, bool stat_only, bool color) {
  // Classes whose changes read alike (the same layer with other constants) are shown once.
  std::vector<std::pair<MethodDiff, std::string>> shown;
  std::map<std::string, size_t> index;
  size_t changed = 0;
  for (auto& m : d) {
    if (m.status == "same") continue;
    ++changed;
    auto body = ops_lines(m, color);
    if (body.empty() && m.method != "(attributes)") body = "  the same operators, put together differently\n";
    if (!stat_only) body += hunks_text(m, color) + "\n";
    auto [it, is_new] = index.emplace(m.type + "." + m.method + " " + m.status + "\n" + body, shown.size());
    if (is_new)
      shown.emplace_back(m, body);
    else
      shown[it->second].first.instances.insert(shown[it->second].first.instances.end(), m.instances.begin(),
                                               m.instances.end());
  }
  if (changed == 0) return fmt::format("No difference in {} method{}.\n", d.size(), d.size() == 1 ? "" : "s");
  std::string text;
  for (auto& [m, body] : shown) {
    auto heading = where(m) + ": " + (m.type.empty() ? "" : m.type + ".") + m.method;
    if (m.status != "changed") heading += " (" + m.status + ")";
    text += painted(heading, "1", color) + "\n" + body;
  }
  return text + fmt::format("{}{} of {} methods differ.\n", stat_only ? "\n" : "", changed, d.size());
}

nlohmann::json to_json(const std::vector<MethodDiff>& d) {
  bool equal = true;
  auto methods = nlohmann::json::array();
  for (auto& m : d) {
    equal &= m.status == "same";
    methods.push_back({{"path", m.path},
                       {"method", m.method},
                       {"status", m.status},
                       {"removed_ops", m.removed_ops},
                       {"added_ops", m.added_ops},
                       {"instances", m.instances}});
  }
  return {{"equal", equal}, {"methods", methods}};
}

}  // namespace tsmem
