#include "rewriter/file/nesting.h"

#include <cctype>
#include <vector>

namespace tsmem {
namespace {

// The end of the string that begins with the quote at `at`.
size_t string_end(std::string_view code, size_t at) {
  const char quote = code[at];
  const bool triple = code.substr(at, 3) == std::string(3, quote);
  for (size_t i = at + (triple ? 3 : 1); i < code.size(); ++i) {
    if (code[i] == '\\')
      ++i;
    else if (triple ? code.substr(i, 3) == std::string(3, quote) : code[i] == quote)
      return i + (triple ? 3 : 1);
    else if (!triple && code[i] == '\n')
      return i;
  }
  return code.size();
}

bool is_operator(std::string_view word) {
  for (auto keyword : {"not", "and", "or", "if", "else", "in", "is"})
    if (word == keyword) return true;
  return false;
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

}  // namespace

std::string nesting_fault(std::string_view code) {
  std::vector<size_t> blocks;          // their indentations
  std::vector<size_t> operators{0};    // in each open bracket, since its last comma
  size_t all_operators = 0, line = 1;  // all_operators: the sum of operators
  const auto reset = [&] {
    all_operators -= operators.back();
    operators.back() = 0;
  };
  const auto add = [&] {
    ++operators.back();
    ++all_operators;
  };
  bool at_line_start = true;
  for (size_t i = 0; i < code.size();) {
    if (at_line_start && operators.size() == 1) {
      size_t indentation = 0;
      while (i < code.size() && (code[i] == ' ' || code[i] == '\t')) ++i, ++indentation;
      if (i < code.size() && code[i] != '\n' && code[i] != '#') {
        while (!blocks.empty() && blocks.back() >= indentation) blocks.pop_back();
        blocks.push_back(indentation);
      }
    }
    at_line_start = false;
    if (i >= code.size()) break;
    const char c = code[i];
    if (c == '\n') {
      ++line;
      at_line_start = true;
      if (operators.size() == 1) reset();
      ++i;
    } else if (c == '#') {
      i = std::min(code.find('\n', i), code.size());
    } else if (c == '"' || c == '\'') {
      const size_t end = string_end(code, i);
      for (; i < end; ++i) line += code[i] == '\n';
      add();
    } else if (is_word(c)) {
      const size_t begin = i;
      while (i < code.size() && is_word(code[i])) ++i;
      if (is_operator(code.substr(begin, i - begin))) add();
    } else {
      ++i;
      if (c == '(' || c == '[' || c == '{') {
        add();
        operators.push_back(0);
      } else if (c == ')' || c == ']' || c == '}') {
        if (operators.size() > 1) {
          reset();
          operators.pop_back();
        }
      } else if (c == ',') {
        reset();
      } else if (c != ' ' && c != '\t' && c != '\r') {
        add();
      }
    }
    if (all_operators + blocks.size() > kDeepestCode)
      return "line " + std::to_string(line) + " nests more than " + std::to_string(kDeepestCode) +
             " brackets, operators and blocks";
  }
  return "";
}

}  // namespace tsmem
