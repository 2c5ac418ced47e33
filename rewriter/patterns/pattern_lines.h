// The text of a pattern's `match` and `rewrite`, line by line.
#pragma once
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace tsmem {

// What is wrong in a pattern, and where: `part` is "match", "rewrite", "sizes" or the name of a list of words, lines
// and columns are counted from 1 in that part's text; line 0: the part as a whole, or `word` of a list.
struct PatternFault {
  std::string part;
  size_t line, column;
  std::string what, word = {};
};

// The activation that a line of `match` names: gelu(%x), leaky_relu(%x, 0.1).
struct NamedAct {
  std::string act;                          // canonical
  std::optional<std::vector<double>> args;  // none: any
};

// "%a, %b = name(%x, 1, "text", ACT, [0, 0])  # a comment".
struct Line {
  std::vector<std::string> outputs;  // without %
  std::string op;
  std::vector<std::string> arguments;  // "%x" or a literal
  std::optional<NamedAct> act = {};    // of canonical lines

  // Where they stand, counted from 1.
  size_t number = 0, op_column = 0;
  std::vector<size_t> output_columns = {}, argument_columns = {};
};

// Lines without anything but a comment are left out. Throws PatternFault, without its part.
std::vector<Line> parse_lines(const std::string& ir);

// The lines of a `rewrite`: operators with their namespace, which is aten where none is written.
std::vector<Line> rewrite_lines(const std::string& ir);

// The lines of a `match`, or of a `rewrite`, with the names that canonical() gives: "act" with what it names, and
// "add_number", "mul_number" where one operand is a number, which comes second.
std::vector<Line> canonical_lines(const std::string& ir);

// The value of "true", "None", "3", "-0.5", "[0, 0]" or "\"text\""; none for everything else.
std::optional<c10::IValue> literal_value(const std::string& text);

inline bool is_value(const std::string& argument) { return argument[0] == '%'; }

// Whether an operator's operands may be swapped.
inline bool commutes(const std::string& op) { return op == "add" || op == "mul"; }

}  // namespace tsmem
