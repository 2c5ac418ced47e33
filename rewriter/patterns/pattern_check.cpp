#include "rewriter/patterns/pattern_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <functional>
#include <map>

#include "ops/act_table.h"
#include "rewriter/patterns/overlap.h"
#include "rewriter/rewrite/canonical.h"
#include "rewriter/rewrite/operators.h"
#include "rewriter/text.h"

namespace tsmem {
namespace {

using c10::FunctionSchema;
using c10::TypePtr;

[[noreturn]] void fault(const std::string& part, const Line& line, size_t column, std::string what) {
  throw PatternFault{part, line.number, column, std::move(what)};
}

// All overloads of an operator, but for those that write to a tensor `out`. The schemas live as long as the registry.
std::vector<const FunctionSchema*> overloads(const std::string& op) {
  std::vector<const FunctionSchema*> all;
  for (const auto& o : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(op))) {
    const auto& formals = o->schema().arguments();
    const bool to_out = std::any_of(formals.begin(), formals.end(), [](const c10::Argument& a) { return a.is_out(); });
    if (!to_out) all.push_back(&o->schema());
  }
  return all;
}

std::string no_operator(const std::string& op) {
  const bool of_aten = op.starts_with("aten::");
  const std::string name = of_aten ? op.substr(6) : op;
  std::vector<std::string> known;
  for (const auto& o : torch::jit::getAllOperators()) {
    const std::string full = o->schema().name();
    if (full.starts_with("aten::") == of_aten) known.push_back(of_aten ? full.substr(6) : full);
  }
  const std::string near = nearest(name, known);
  if (!near.empty()) return fmt::format("there is no operator '{}' (did you mean '{}'?)", name, near);
  return of_aten ? fmt::format("PyTorch has no operator '{}'; one of another library is written mine::op", name)
                 : fmt::format("there is no operator '{}': load the library that defines it first", name);
}

// Whether a literal may be given where a schema has that type.
bool accepts(const TypePtr& type, const c10::IValue& value) {
  if (const auto optional = type->cast<c10::OptionalType>())
    return value.isNone() || accepts(optional->getElementType(), value);
  if (const auto list = type->cast<c10::ListType>(); list && value.isList()) {
    for (const c10::IValue& element : value.toListRef())
      if (!accepts(list->getElementType(), element)) return false;
    return true;
  }
  const bool number = type->kind() == c10::NumberType::Kind && (value.isInt() || value.isDouble());
  return number || value.type()->isSubtypeOf(*type);
}

// A sum or product of a tensor and a number, by its canonical name.
bool is_with_number(const std::string& name) { return name == "add_number" || name == "mul_number"; }

std::string parameters(const FunctionSchema& schema) {
  std::vector<std::string> names;
  for (const auto& a : schema.arguments()) names.push_back(a.name());
  return names.empty() ? "" : fmt::format(" ({})", fmt::join(names, ", "));
}

std::string counted(size_t n, const std::string& noun) {
  return fmt::format("{} {}{}", n == 0 ? "no" : std::to_string(n), noun, n == 1 ? "" : "s");
}

// The overload whose number of arguments is nearest to that of the line, for a message.
const FunctionSchema& nearest_overload(const std::vector<const FunctionSchema*>& all, size_t given) {
  const auto distance = [&](const FunctionSchema* s) {
    return std::abs(static_cast<int64_t>(s->arguments().size()) - static_cast<int64_t>(given));
  };
  return **std::min_element(all.begin(), all.end(), [&](auto* a, auto* b) { return distance(a) < distance(b); });
}

[[noreturn]] void wrong_count(const std::string& part, const Line& line, const FunctionSchema& schema) {
  const size_t takes = schema.arguments().size(), given = line.arguments.size();
  const size_t column = given > takes ? line.argument_columns[takes] : line.op_column;
  fault(part, line, column,
        fmt::format("{} takes {}{}, and {} given", line.op, counted(takes, "argument"), parameters(schema),
                    given == 0   ? "none is"
                    : given == 1 ? "1 is"
                                 : std::to_string(given) + " are"));
}

// --- match ---

// An activation by its own name, or `act` for any.
void check_activation(const Line& line, const std::optional<KnownActivation>& known) {
  if (line.arguments.empty() || !is_value(line.arguments[0]))
    fault("match", line, line.op_column, fmt::format("{} takes the tensor that it acts on, such as %x", line.op));
  for (size_t i = 1; i < line.arguments.size(); ++i) {
    const auto value = literal_value(line.arguments[i]);
    const bool approximation = line.op == "gelu" && i == 1 && value && value->isString() &&
                               (value->toStringRef() == "tanh" || value->toStringRef() == "none");
    const bool number = known && value && (value->isInt() || value->isDouble()) && i <= known->from_inputs;
    if (!approximation && !number)
      fault("match", line, line.argument_columns[i],
            known && known->from_inputs > 0
                ? fmt::format("after the tensor {} takes its {} in PyTorch's order, or nothing", line.op,
                              counted(known->from_inputs, "number"))
                : fmt::format("{} takes one argument, the tensor that it acts on", line.op));
  }
  if (known && line.arguments.size() > 1 && known->from_inputs > 0 && line.arguments.size() != known->from_inputs + 1)
    fault("match", line, line.op_column,
          fmt::format("after the tensor {} takes its {} in PyTorch's order, or nothing", line.op,
                      counted(known->from_inputs, "number")));
}

void check_sum_or_product(const Line& line) {
  if (line.arguments.size() != 2)
    fault("match", line, line.op_column,
          fmt::format("{} takes two arguments here, in either order: two tensors, or a tensor and a number", line.op));
  size_t values = 0;
  for (size_t i = 0; i < 2; ++i) {
    const auto literal = literal_value(line.arguments[i]);
    values += is_value(line.arguments[i]);
    if (!is_value(line.arguments[i]) && !(literal && (literal->isInt() || literal->isDouble())))
      fault("match", line, line.argument_columns[i], fmt::format("{} takes a tensor or a number here", line.op));
  }
  if (values == 0) fault("match", line, line.op_column, fmt::format("{} needs a tensor such as %x", line.op));
}

void check_matched_operator(const Line& line) {
  const std::string name = line.op.starts_with("aten::") ? line.op.substr(6) : line.op;
  const bool qualified = name.find("::") != std::string::npos;
  if (name.starts_with("tsmem::"))
    fault("match", line, line.op_column,
          fmt::format("{} is put in by a rewrite, so nothing has it before; match PyTorch's operators", name));
  if (!qualified && name.size() > 1 && name.ends_with('_') && !name.ends_with("__"))
    fault("match", line, line.op_column,
          fmt::format("write {}, without the underscore: it stands for both", name.substr(0, name.size() - 1)));
  const auto known = known_activation(name);
  if (known || name == "act") return check_activation(line, known);
  if (name == "celu") fault("match", line, line.op_column, "celu is matched as elu: write elu(%x)");
  if (commutes(name)) return check_sum_or_product(line);
  if (is_with_number(name)) return;
  const auto all = overloads(qualified ? name : "aten::" + name);
  if (all.empty()) fault("match", line, line.op_column, no_operator(qualified ? name : "aten::" + name));
  size_t wrong = 0;  // argument of the last overload with this many
  bool counts = false, fits = false;
  for (const FunctionSchema* schema : all) {
    if (schema->arguments().size() != line.arguments.size()) continue;
    counts = true;
    size_t i = 0;
    while (i < line.arguments.size() &&
           (is_value(line.arguments[i]) || (literal_value(line.arguments[i]) &&
                                            accepts(schema->arguments()[i].type(), *literal_value(line.arguments[i])))))
      ++i;
    fits |= i == line.arguments.size() && schema->returns().size() >= line.outputs.size();
    if (i < line.arguments.size()) wrong = i + 1;
    if (qualified && schema->is_mutable())
      fault("match", line, line.op_column, fmt::format("{} writes to its arguments, so it can't be replaced", name));
  }
  const FunctionSchema& schema = nearest_overload(all, line.arguments.size());
  if (!counts) wrong_count("match", line, schema);
  if (fits) return;
  if (wrong == 0)
    fault("match", line, line.output_columns.back(),
          fmt::format("{} makes {}", line.op, counted(schema.returns().size(), "value")));
  fault("match", line, line.argument_columns[wrong - 1],
        fmt::format("{} takes no {} for {}, which is of type {}", line.op, line.arguments[wrong - 1],
                    schema.arguments()[wrong - 1].name(), schema.arguments()[wrong - 1].type()->repr_str()));
}

// What the lines of a match say of its values.
struct Matched {
  std::vector<Line> lines;
  std::map<std::string, size_t> made_by;  // inner values and results, by line
  std::set<std::string> inputs;
  std::vector<std::set<size_t>> before;             // of each line: itself and the lines that lead to it
  std::map<std::string, std::set<size_t>> readers;  // of each input

  // Whether a value of the match is there where a line stands: that line or one before it reads or makes it.
  bool there(const std::string& name, size_t line) const {
    if (const auto made = made_by.find(name); made != made_by.end()) return before[line].count(made->second) > 0;
    const auto& all = readers.at(name);
    return std::any_of(all.begin(), all.end(), [&](size_t reader) { return before[line].count(reader) > 0; });
  }
};

Matched check_match(const Rule& rule) {
  Matched m{parse_lines(rule.match), {}, {}, {}, {}};
  if (m.lines.empty()) throw PatternFault{"match", 0, 0, "expected lines to match, such as %z = relu(%x)"};
  std::set<size_t> used;
  for (size_t i = 0; i < m.lines.size(); ++i) {
    const Line& line = m.lines[i];
    check_matched_operator(line);
    m.before.push_back({i});
    for (size_t k = 0; k < line.arguments.size(); ++k) {
      if (!is_value(line.arguments[k])) {
        if (!literal_value(line.arguments[k]))
          fault("match", line, line.argument_columns[k],
                fmt::format("{} is for rewrite alone; in match write a value such as %x", line.arguments[k]));
        continue;
      }
      const std::string name = line.arguments[k].substr(1);
      if (const auto made = m.made_by.find(name); made != m.made_by.end()) {
        used.insert(made->second);
        m.before[i].insert(m.before[made->second].begin(), m.before[made->second].end());
      } else {
        m.inputs.insert(name);
        m.readers[name].insert(i);
      }
    }
    for (size_t k = 0; k < line.outputs.size(); ++k) {
      if (m.inputs.count(line.outputs[k]))
        fault("match", line, line.output_columns[k],
              fmt::format("%{} is read before this line makes it", line.outputs[k]));
      if (!m.made_by.emplace(line.outputs[k], i).second)
        fault("match", line, line.output_columns[k], fmt::format("%{} is made twice", line.outputs[k]));
    }
  }
  for (size_t i = 0; i < m.lines.size(); ++i)
    if (!m.before.back().count(i))
      fault("match", m.lines[i], m.lines[i].output_columns[0],
            fmt::format("the last line of match does not come from %{}: every line must lead to it",
                        m.lines[i].outputs[0]));
  return m;
}

// --- rewrite ---

// The arguments that a line gives to a schema: ACT is two of them, and none stands for what the rewriter adds to
// operators of this library.
struct Given {
  std::string argument;
  size_t column;
  bool part = false;  // the second of ACT
};

std::vector<Given> given_arguments(const Line& line) {
  std::vector<Given> given;
  for (size_t i = 0; i < line.arguments.size(); ++i) {
    given.push_back({line.arguments[i], line.argument_columns[i]});
    if (line.arguments[i] == "ACT") given.push_back({"ACT", line.argument_columns[i], true});
  }
  return given;
}

bool added_by_rewriter(const std::string& op, const std::string& argument) {
  static const std::set<std::string> added = {"recompute", "act_in_place", "in_place", "draw"};
  return op.starts_with("tsmem::") && added.count(argument) > 0;
}

bool takes_argument(const TypePtr& type, const Given& g, const std::map<std::string, TypePtr>& known) {
  if (g.argument == "ACT")
    return type->isSubtypeOf(g.part ? *c10::ListType::ofFloats() : *TypePtr(c10::StringType::get()));
  if (g.argument == "DRAWS") return type->kind() == c10::BoolType::Kind;
  if (const auto value = literal_value(g.argument)) return accepts(type, *value);
  const auto of = known.find(g.argument.substr(1));
  return of == known.end() || of->second->isSubtypeOf(*type);
}

// The overload that a line calls: one that `wanted` likes, if there is one. Throws PatternFault where there is none at
// all.
const FunctionSchema& called(const std::string& part, const Line& line, const std::map<std::string, TypePtr>& known,
                             const std::function<bool(const FunctionSchema&)>& wanted) {
  const auto all = overloads(line.op);
  if (all.empty()) fault(part, line, line.op_column, no_operator(line.op));
  const auto given = given_arguments(line);
  const FunctionSchema *counts = nullptr, *takes = nullptr;
  size_t wrong = 0;
  for (const FunctionSchema* schema : all) {
    const auto& formals = schema->arguments();
    bool enough = given.size() <= formals.size();
    for (size_t i = given.size(); i < formals.size(); ++i)
      enough &= formals[i].default_value().has_value() || added_by_rewriter(line.op, formals[i].name());
    if (!enough) continue;
    size_t i = 0;
    while (i < given.size() && takes_argument(formals[i].type(), given[i], known)) ++i;
    if (i == given.size()) {
      if (wanted(*schema)) return *schema;
      if (!takes) takes = schema;
    } else {
      counts = schema;
      wrong = i;
    }
  }
  if (takes) return *takes;
  if (!counts) wrong_count(part, line, nearest_overload(all, given.size()));
  const auto& formal = counts->arguments()[wrong];
  fault(part, line, given[wrong].column,
        fmt::format("{} takes no {} for {}, which is of type {}", line.op, given[wrong].argument, formal.name(),
                    formal.type()->repr_str()));
}

// The type of a result of a matched operator; null where its overloads differ.
TypePtr result_type(const Line& line, size_t k) {
  const std::string name = line.op.starts_with("aten::") ? line.op.substr(6) : line.op;
  if (name == "act" || known_activation(name) || commutes(name) || is_with_number(name)) return c10::TensorType::get();
  TypePtr type;
  for (const FunctionSchema* schema : overloads(name.find("::") == std::string::npos ? "aten::" + name : name)) {
    if (schema->arguments().size() != line.arguments.size() || schema->returns().size() <= k) continue;
    if (type && *type != *schema->returns()[k].type()) return nullptr;
    type = schema->returns()[k].type();
  }
  return type;
}

void check_operands(const Matched& m, const Line& line, size_t at, const std::map<std::string, size_t>& made) {
  for (size_t k = 0; k < line.arguments.size(); ++k) {
    if (!is_value(line.arguments[k])) continue;
    const std::string name = line.arguments[k].substr(1);
    const auto own = made.find(name);
    if (own == made.end() && m.made_by.count(name))
      fault("rewrite", line, line.argument_columns[k],
            fmt::format("%{} is made inside match, and no line of rewrite before this one makes it", name));
    if (own == made.end() && !m.inputs.count(name))
      fault("rewrite", line, line.argument_columns[k], fmt::format("neither match nor rewrite makes %{}", name));
    if (own != made.end() ? !m.before[at].count(own->second) : !m.there(name, at))
      fault("rewrite", line, line.argument_columns[k],
            fmt::format("{} is put where %{} was made, and %{} may not be there yet", line.op, line.outputs[0], name));
  }
}

void check_rewrite(const Rule& rule, const Matched& m) {
  const auto lines = rewrite_lines(rule.rewrite);
  if (lines.empty())
    throw PatternFault{"rewrite", 0, 0, "expected lines to put in the place of match, such as %z = mine::op(%x)"};
  std::map<std::string, size_t> made;  // and where in match it is put
  std::map<std::string, TypePtr> types;
  for (const Line& line : lines) {
    const std::string& first = line.outputs[0];
    const auto place = m.made_by.find(first);
    if (place == m.made_by.end() || m.lines[place->second].outputs[0] != first)
      fault("rewrite", line, line.output_columns[0],
            fmt::format("%{} is not what a line of match makes: a line of rewrite is put in the place of that one",
                        first));
    const size_t at = place->second;
    check_operands(m, line, at, made);
    const auto wanted_type = [&](const std::string& name) -> TypePtr {
      const auto old = m.made_by.find(name);
      if (old == m.made_by.end()) return nullptr;
      const Line& from = m.lines[old->second];
      return result_type(from, std::find(from.outputs.begin(), from.outputs.end(), name) - from.outputs.begin());
    };
    const FunctionSchema& schema = called("rewrite", line, types, [&](const FunctionSchema& s) {
      bool fits = s.returns().size() == line.outputs.size();
      for (size_t k = 0; k < line.outputs.size() && fits; ++k)
        if (const TypePtr wanted = wanted_type(line.outputs[k])) fits = s.returns()[k].type()->isSubtypeOf(*wanted);
      return fits;
    });
    if (schema.returns().size() != line.outputs.size())
      fault("rewrite", line, line.output_columns.back(),
            fmt::format("{} makes {}, and {} named", line.op, counted(schema.returns().size(), "value"),
                        line.outputs.size() == 1 ? "1 is" : std::to_string(line.outputs.size()) + " are"));
    for (size_t k = 0; k < line.outputs.size(); ++k) {
      const std::string& name = line.outputs[k];
      const TypePtr type = schema.returns()[k].type();
      if (m.inputs.count(name))
        fault("rewrite", line, line.output_columns[k], fmt::format("%{} is an input of match", name));
      if (!made.emplace(name, at).second)
        fault("rewrite", line, line.output_columns[k], fmt::format("%{} is made twice", name));
      types[name] = type;
      if (const TypePtr wanted = wanted_type(name); wanted && !type->isSubtypeOf(*wanted))
        fault("rewrite", line, line.output_columns[k],
              fmt::format("%{} is a {}, and {} makes a {} here", name, wanted->repr_str(), line.op, type->repr_str()));
    }
  }
  for (const std::string& name : m.lines.back().outputs)
    if (!made.count(name))
      throw PatternFault{"rewrite", 0, 0, fmt::format("no line of rewrite makes %{}, the result of match", name)};
  for (const std::string& name : rule.shared)
    if (!m.made_by.count(name) || !made.count(name))
      throw PatternFault{
          "shared", 0, 0,
          fmt::format("%{} is not a value that both match and rewrite make, so it can't have other users", name),
          "%" + name};
}

// --- the rest ---

void check_sizes(const Rule& rule, const Matched& m) {
  if (rule.sizes.empty()) return;
  const auto lines = rewrite_lines(rule.sizes);
  if (lines.size() != 1 || lines[0].outputs.size() != 1)
    throw PatternFault{"sizes", 0, 0, "expected one line, such as %c = mine::output_size(%x)"};
  const Line& line = lines[0];
  const auto place = m.made_by.find(line.outputs[0]);
  if (place == m.made_by.end() || place->second + 1 == m.lines.size())
    fault("sizes", line, line.output_columns[0], fmt::format("%{} is not an inner value of match", line.outputs[0]));
  check_operands(m, line, place->second, {});
  if (const TypePtr type = called("sizes", line, {}, [](const FunctionSchema&) { return true; }).returns()[0].type();
      !type->isSubtypeOf(*c10::ListType::ofInts()))
    fault("sizes", line, line.op_column,
          fmt::format("{} makes a {}, and sizes are an int[]", line.op, type->repr_str()));
}

void check_words(const Rule& rule, const Matched& m) {
  for (const std::string& name : rule.intact)
    if (!m.inputs.count(name) && !m.made_by.count(name))
      throw PatternFault{"keeps", 0, 0, fmt::format("%{} is not a value of match", name), "%" + name};
  const bool any_act = std::any_of(m.lines.begin(), m.lines.end(), [](const Line& l) { return l.op == "act"; });
  for (const std::string& name : rule.activations) {
    if (!any_act) throw PatternFault{"activations", 0, 0, "match has no line with act, which activations are for"};
    std::vector<std::string> names = {"in-place"};
    for (const ActInfo& info : kActivations)
      if (info.saves != ActSaves::nothing) names.push_back(info.name);
    if (std::find(names.begin(), names.end(), name) == names.end())
      throw PatternFault{"activations", 0, 0,
                         fmt::format("'{}' is not an activation here; there are: {}", name, fmt::join(names, ", ")),
                         name};
  }
  for (const std::string& name : rule.fed_by) {
    const bool known = name == "act" || name == "parameter" || name == "kept" || is_with_number(name) ||
                       !overloads(name.find("::") == std::string::npos ? "aten::" + name : name).empty();
    if (!known) throw PatternFault{"fed-by", 0, 0, no_operator("aten::" + name), name};
  }
}

}  // namespace

void check_rule(const Rule& rule) {
  const auto in = [](const char* part, const auto& check) {
    try {
      return check();
    } catch (PatternFault& f) {
      if (f.part.empty()) f.part = part;
      throw;
    }
  };
  const Matched m = in("match", [&] { return check_match(rule); });
  in("rewrite", [&] { check_rewrite(rule, m); });
  in("sizes", [&] { check_sizes(rule, m); });
  check_words(rule, m);
  if (matches_what_is_put(rule, rule))
    throw PatternFault{"rewrite", 0, 0, "the pattern would match its own replacement, again and again"};
}

std::set<std::string> tensors_read(const Rule& rule) {
  std::set<std::string> made, read;
  for (const Line& line : parse_lines(rule.match)) made.insert(line.outputs.begin(), line.outputs.end());
  for (const Line& line : rewrite_lines(rule.rewrite)) {
    const auto given = given_arguments(line);
    for (const FunctionSchema* schema : overloads(line.op))
      for (size_t i = 0; i < std::min(given.size(), schema->arguments().size()); ++i)
        if (is_value(given[i].argument) && !made.count(given[i].argument.substr(1)) &&
            may_hold_tensor(schema->arguments()[i].type()))
          read.insert(given[i].argument.substr(1));
    made.insert(line.outputs.begin(), line.outputs.end());
  }
  return read;
}

}  // namespace tsmem
