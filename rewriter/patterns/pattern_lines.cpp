#include "rewriter/patterns/pattern_lines.h"

#include <fmt/format.h>

#include <charconv>

#include "rewriter/rewrite/canonical.h"

namespace tsmem {
namespace {

std::optional<c10::IValue> number_value(std::string_view text) {
  const char *first = text.data(), *last = first + text.size();
  int64_t whole = 0;
  if (auto [end, error] = std::from_chars(first, last, whole); error == std::errc() && end == last) return whole;
  double real = 0;
  if (auto [end, error] = std::from_chars(first, last, real); error == std::errc() && end == last) return real;
  return std::nullopt;
}

// A list has whole numbers alone, or it has doubles.
std::optional<c10::IValue> list_value(std::string_view text) {
  std::vector<double> reals;
  std::vector<int64_t> wholes;
  if (text.size() > 1 && text.find_first_not_of(' ', 1) == text.size() - 1) return wholes;  // []
  for (size_t at = 1; at < text.size();) {
    const size_t end = text.find_first_of(",]", at);
    std::string_view element = text.substr(at, end - at);
    while (element.starts_with(' ')) element.remove_prefix(1);
    while (element.ends_with(' ')) element.remove_suffix(1);
    const auto value = number_value(element);
    if (!value) return std::nullopt;
    if (value->isInt()) wholes.push_back(value->toInt());
    reals.push_back(value->toScalar().toDouble());
    at = end + 1;
  }
  return wholes.size() == reals.size() ? c10::IValue(wholes) : c10::IValue(reals);
}

bool in_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Reads one line from left to right.
class Reader {
 public:
  Reader(const std::string& text, size_t number) : text_(text), number_(number) {}

  bool ended() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ == text_.size() || text_[at_] == '#';
  }
  size_t column() {
    ended();
    return at_ + 1;
  }
  bool take(char c) {
    if (ended() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  [[noreturn]] void expected(const std::string& what) {
    const std::string found = ended() ? "the line's end" : fmt::format("'{}'", word_here());
    throw PatternFault{"", number_, at_ + 1, fmt::format("expected {}, found {}", what, found)};
  }
  // "%name", without the %.
  std::string value(const std::string& what) {
    if (!take('%') || at_ == text_.size() || !in_name(text_[at_])) {
      if (at_ > 0 && text_[at_ - 1] == '%') --at_;
      expected(what);
    }
    return name();
  }
  // "add", "aten::add", "mine::gelu".
  std::string op() {
    if (ended() || !in_name(text_[at_])) expected("an operator such as relu or mine::op");
    std::string all = name();
    if (text_.compare(at_, 2, "::") == 0) {
      at_ += 2;
      if (at_ == text_.size() || !in_name(text_[at_])) expected("an operator's name after '" + all + "::'");
      all += "::" + name();
    }
    return all;
  }
  std::string argument() {
    const char* what = "an argument: a value such as %x, a number, true, None, \"text\", [1, 1] or ACT";
    if (ended()) expected(what);
    const char c = text_[at_];
    if (c == '%') return "%" + value("a value such as %x");
    if (c == '"' || c == '\'') return quoted(c);
    if (c == '[') return list();
    const size_t from = at_;
    while (at_ < text_.size() && (in_name(text_[at_]) || std::string_view("+-.").find(text_[at_]) != std::string::npos))
      ++at_;
    std::string word = text_.substr(from, at_ - from);
    if (word == "True" || word == "False") word[0] = static_cast<char>(std::tolower(word[0]));
    if (word == "ACT" || word == "DRAWS" || literal_value(word)) return word;
    at_ = from;
    expected(what);
  }

 private:
  const std::string& text_;
  size_t number_, at_ = 0;

  std::string name() {
    const size_t from = at_;
    while (at_ < text_.size() && in_name(text_[at_])) ++at_;
    return text_.substr(from, at_ - from);
  }
  std::string word_here() const {
    size_t end = at_;
    while (end < text_.size() && in_name(text_[end])) ++end;
    return text_.substr(at_, std::max<size_t>(end - at_, 1));
  }
  std::string quoted(char quote) {
    const size_t end = text_.find(quote, at_ + 1);
    if (end == text_.npos) {
      at_ = text_.size();
      expected(fmt::format("{} at the text's end", quote));
    }
    const std::string inside = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return '"' + inside + '"';
  }
  std::string list() {
    const size_t from = at_, end = text_.find(']', at_);
    const std::string all = end == text_.npos ? "" : text_.substr(from, end + 1 - from);
    if (!literal_value(all)) expected("a list of numbers such as [1, 1]");
    at_ = end + 1;
    return all;
  }
};

Line parse_line(const std::string& text, size_t number) {
  Reader in(text, number);
  Line line;
  line.number = number;
  do {
    line.output_columns.push_back(in.column());
    line.outputs.push_back(in.value("a line such as %z = relu(%x)"));
  } while (in.take(','));
  if (!in.take('=')) in.expected("'=' after the values that the line makes");
  line.op_column = in.column();
  line.op = in.op();
  if (!in.take('(')) in.expected("'(' after " + line.op);
  if (!in.take(')')) {
    do {
      line.argument_columns.push_back(in.column());
      line.arguments.push_back(in.argument());
    } while (in.take(','));
    if (!in.take(')')) in.expected("',' or ')' after an argument of " + line.op);
  }
  if (!in.ended()) in.expected("nothing after the operator's ')'");
  return line;
}

// The activation that a line names, whose arguments are numbers or left out.
NamedAct named_act(const Line& line, const KnownActivation& known) {
  NamedAct named{known.act, std::nullopt};
  if (line.op == "gelu" && line.arguments.size() > 1 && line.arguments[1] == "\"tanh\"") named.act = "gelu_tanh";
  if (!known.fixed.empty() || known.from_inputs == 0) named.args = known.fixed;
  if (line.arguments.size() < 2 || known.from_inputs == 0) return named;
  named.args.emplace();
  for (size_t i = 1; i < line.arguments.size(); ++i)
    if (const auto v = literal_value(line.arguments[i]); v && v->isScalar())
      named.args->push_back(v->toScalar().toDouble());
  return named;
}

}  // namespace

std::optional<c10::IValue> literal_value(const std::string& text) {
  if (text.empty()) return std::nullopt;
  if (text == "None") return c10::IValue();
  if (text == "true" || text == "false") return c10::IValue(text == "true");
  if (text.front() == '"') return c10::IValue(text.substr(1, text.size() - 2));
  if (text.front() == '[') return list_value(text);
  return number_value(text);
}

std::vector<Line> parse_lines(const std::string& ir) {
  std::vector<Line> lines;
  size_t number = 0;
  for (size_t from = 0; from <= ir.size();) {
    const size_t end = std::min(ir.find('\n', from), ir.size());
    const std::string text = ir.substr(from, end - from);
    if (++number; !Reader(text, number).ended()) lines.push_back(parse_line(text, number));
    from = end + 1;
  }
  return lines;
}

std::vector<Line> rewrite_lines(const std::string& ir) {
  std::vector<Line> lines = parse_lines(ir);
  for (Line& line : lines)
    if (line.op.find("::") == std::string::npos) line.op = "aten::" + line.op;
  return lines;
}

std::vector<Line> canonical_lines(const std::string& ir) {
  std::vector<Line> lines = parse_lines(ir);
  for (Line& line : lines) {
    if (line.op.starts_with("aten::")) line.op.erase(0, 6);
    if (const auto known = known_activation(line.op)) {
      line.act = named_act(line, *known);
      line.op = "act";
      line.arguments.resize(std::min<size_t>(line.arguments.size(), 1));
    } else if (commutes(line.op) && line.arguments.size() == 2) {
      if (!is_value(line.arguments[0])) std::swap(line.arguments[0], line.arguments[1]);
      if (!is_value(line.arguments[1])) line.op += "_number";
    }
  }
  return lines;
}

}  // namespace tsmem
