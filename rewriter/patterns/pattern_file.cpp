// Patterns as text: a line begins with a keyword, or with % where it belongs to `match` or `rewrite`.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "patterns/pattern.h"
#include "rewriter/patterns/overlap.h"
#include "rewriter/patterns/pattern_check.h"
#include "rewriter/text.h"
#include "tsmem/error.h"

namespace tsmem {
namespace {

struct Position {
  size_t line, column;
};

const std::vector<std::string> kKeywords = {"pattern", "about",        "match",          "rewrite",
                                            "keeps",   "shared",       "sizes",          "activations",
                                            "fed-by",  "only-by-name", "only-at-regions"};

std::string read_text(const std::string& file) {
  std::error_code ignored;
  std::ifstream in(file, std::ios::binary);
  if (!in || std::filesystem::is_directory(file, ignored))
    throw Error(ErrorKind::input, fmt::format("The pattern file '{}' can't be read.", file));
  constexpr size_t kMost = 1 << 20;
  std::string text(kMost, '\0');
  in.read(text.data(), static_cast<std::streamsize>(kMost));
  text.resize(static_cast<size_t>(in.gcount()));
  for (const char c : text)
    if (std::iscntrl(static_cast<unsigned char>(c)) && c != '\n' && c != '\t' && c != '\r')
      throw Error(ErrorKind::input, fmt::format("'{}' is not a text file, so it can't be a pattern file.", file));
  if (text.size() == kMost) throw Error(ErrorKind::input, fmt::format("The pattern file '{}' is too large.", file));
  return text;
}

bool is_pattern_name(std::string_view name) {
  return !name.empty() && name.front() != '-' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_'; });
}

const Pattern* built_in(const std::string& name) {
  for (const Pattern& p : all_patterns())
    if (p.name == name) return &p;
  return nullptr;
}

std::string name_taken(const std::string& name) {
  return fmt::format("tsmem has a pattern '{}' of its own: choose another name", name);
}

// A rule with where its parts begin in the file.
struct PlacedRule {
  Rule rule;
  std::map<std::string, Position> parts;                          // of keywords
  std::map<std::pair<std::string, std::string>, Position> words;  // by keyword and word
  bool has(const std::string& part) const { return parts.count(part) > 0; }
};

class PatternFile {
 public:
  explicit PatternFile(const std::string& file) : file_(file) {
    const std::string text = read_text(file);
    for (size_t from = 0; from < text.size(); from = text.find('\n', from) + 1) {
      ++line_;
      const size_t end = std::min(text.find('\n', from), text.size());
      take_line(text.substr(from, end - from));
      if (end == text.size()) break;
    }
    finish_pattern();
    if (patterns_.empty()) fail({line_ + 1, 1}, "expected a line such as 'pattern my-pattern'");
  }
  std::vector<Pattern> patterns() && { return std::move(patterns_); }

 private:
  std::string file_;
  size_t line_ = 0;
  std::vector<Pattern> patterns_;
  bool in_pattern_ = false;
  Position begun_{};                // the pattern's name
  std::vector<PlacedRule> rules_;   // of the pattern
  std::string* section_ = nullptr;  // the text that lines with % belong to

  [[noreturn]] void fail(Position at, const std::string& what) const {
    throw Error(ErrorKind::input, fmt::format("{}:{}:{}: {}.", file_, at.line, at.column, what));
  }

  void take_line(const std::string& text) {
    const size_t first = text.find_first_not_of(" \t\r");
    const bool code = first != text.npos && text[first] == '%';
    if (section_ && (code || first == text.npos || text[first] == '#')) {
      *section_ += "\n" + text;
      return;
    }
    if (first == text.npos || text[first] == '#') return;
    if (code) fail({line_, first + 1}, "expected match or rewrite before lines of operators");
    const size_t end = std::min(text.find_first_of(" \t\r#", first), text.size());
    take_keyword(text.substr(first, end - first), {line_, first + 1}, std::string(end, ' ') + text.substr(end));
  }

  // `rest`: the line with spaces in the keyword's place.
  void take_keyword(const std::string& keyword, Position at, const std::string& rest) {
    if (std::find(kKeywords.begin(), kKeywords.end(), keyword) == kKeywords.end()) {
      const std::string near = nearest(keyword, kKeywords);
      fail(at, fmt::format("expected a line of operators, which begins with %, or one of {}; found '{}'{}",
                           fmt::join(kKeywords, ", "), keyword,
                           near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near)));
    }
    section_ = nullptr;
    if (keyword == "pattern") return begin_pattern(at, rest);
    if (!in_pattern_) fail(at, fmt::format("expected 'pattern NAME' before {}", keyword));
    if (keyword == "about") {
      patterns_.back().algebra = strip(rest);
    } else if (keyword == "only-by-name" || keyword == "only-at-regions") {
      const std::string code = rest.substr(0, rest.find('#'));
      if (const auto more = strip(code); !more.empty())
        fail({line_, rest.find(more) + 1}, fmt::format("expected nothing after {}", keyword));
      (keyword == "only-by-name" ? patterns_.back().by_default = false : patterns_.back().for_regions = true);
    } else {
      take_part(keyword, at, rest);
    }
  }

  void begin_pattern(Position at, const std::string& rest) {
    finish_pattern();
    const std::string name(strip(rest.substr(0, rest.find('#'))));
    begun_ = {line_, name.empty() ? at.column + std::string("pattern ").size() : rest.find(name) + 1};
    if (!is_pattern_name(name)) fail(begun_, "expected a name of letters, digits and '-' after pattern");
    if (built_in(name)) fail(begun_, name_taken(name));
    for (const Pattern& p : patterns_)
      if (p.name == name) fail(begun_, fmt::format("there are two patterns '{}'", name));
    patterns_.push_back({.name = name, .algebra = "", .keeps = "", .conditions = "", .rules = {}});
    in_pattern_ = true;
  }

  void take_part(const std::string& keyword, Position at, const std::string& rest) {
    if (keyword == "match") {
      if (!rules_.empty() && !rules_.back().has("rewrite")) fail(at, "expected rewrite before another match");
      rules_.emplace_back();
    }
    if (rules_.empty()) fail(at, fmt::format("expected match before {}", keyword));
    PlacedRule& rule = rules_.back();
    if (!rule.parts.emplace(keyword, at).second) fail(at, fmt::format("{} is there twice", keyword));
    if (keyword == "match") section_ = &rule.rule.match;
    if (keyword == "rewrite") section_ = &rule.rule.rewrite;
    if (section_)
      *section_ = rest;
    else if (keyword == "sizes")
      rule.rule.sizes = rest;
    else
      take_words(keyword, rest, rule);
  }

  // "%x, %y" or "relu, gelu".
  void take_words(const std::string& keyword, const std::string& rest, PlacedRule& rule) {
    const bool values = keyword == "keeps" || keyword == "shared";
    auto& to = keyword == "keeps"         ? rule.rule.intact
               : keyword == "shared"      ? rule.rule.shared
               : keyword == "activations" ? rule.rule.activations
                                          : rule.rule.fed_by;
    const std::string text = rest.substr(0, rest.find('#'));
    if (keyword == "keeps" && strip(text) == "nothing") return;
    for (size_t from = 0; from <= text.size();) {
      const size_t end = std::min(text.find(',', from), text.size());
      const std::string word(strip(text.substr(from, end - from)));
      const Position at{line_, text.find_first_not_of(" \t\r", from) == text.npos
                                   ? text.size() + 1
                                   : text.find_first_not_of(" \t\r", from) + 1};
      const bool good = values ? word.size() > 1 && word[0] == '%' : !word.empty() && word[0] != '%';
      if (!good || word.find_first_of(" \t") != word.npos)
        fail(at, fmt::format("expected {} after {}, with commas between them",
                             values ? "values such as %x" : "names such as relu", keyword));
      to.insert(values ? word.substr(1) : word);
      rule.words[{keyword, word}] = at;
      from = end + 1;
    }
  }

  void finish_pattern() {
    section_ = nullptr;
    if (!in_pattern_) return;
    Pattern& p = patterns_.back();
    if (rules_.empty()) fail(begun_, fmt::format("pattern {} has no match", p.name));
    for (PlacedRule& rule : rules_) {
      if (!rule.has("rewrite")) fail(rule.parts.at("match"), "expected rewrite after match, and the file has none");
      check(rule);
      // Unless it says otherwise, an operator is taken to keep all that it reads.
      if (!rule.has("keeps")) rule.rule.intact = tensors_read(rule.rule);
      p.rules.push_back(std::move(rule.rule));
    }
    describe(p);
    rules_.clear();
    in_pattern_ = false;
  }

  void check(const PlacedRule& rule) const {
    try {
      check_rule(rule.rule);
    } catch (const PatternFault& f) {
      const auto word = rule.words.find({f.part, f.word});
      const Position part = rule.parts.at(f.part);
      fail(word != rule.words.end() ? word->second
           : f.line == 0            ? part
                                    : Position{part.line + f.line - 1, f.column},
           f.what);
    }
  }

  // The words that `patterns` and `rewrite` show.
  static void describe(Pattern& p) {
    std::set<std::string> kept;
    for (const Rule& r : p.rules) kept.insert(r.intact.begin(), r.intact.end());
    p.keeps = kept.empty() ? "nothing" : fmt::format("{}", fmt::join(kept, ", "));
    p.conditions = "what is made inside match has no other user";
    if (!kept.empty()) p.conditions += fmt::format("; nothing writes to {} later", p.keeps);
  }
};

}  // namespace

std::vector<Pattern> read_patterns(const std::string& file) { return PatternFile(file).patterns(); }

void check_patterns(const std::vector<Pattern>& patterns) {
  std::set<std::string> names;
  for (const Pattern& p : patterns) {
    const auto fail = [&](const std::string& what) {
      throw Error(ErrorKind::request, fmt::format("Pattern {}: {}", p.name, what));
    };
    if (!is_pattern_name(p.name)) fail("a name has letters, digits and '-'");
    if (built_in(p.name)) fail(name_taken(p.name));
    if (!names.insert(p.name).second) fail("there are two patterns of this name");
    if (p.rules.empty()) fail("it has no rule");
    for (const Rule& rule : p.rules) try {
        check_rule(rule);
      } catch (const PatternFault& f) {
        fail(f.line == 0 ? f.what : fmt::format("{}, line {}, column {}: {}", f.part, f.line, f.column, f.what));
      }
  }
}

// Whether `is` holds for a rule of one pattern and one of the other.
static bool any_rules(const Pattern& p, const Pattern& q, bool (*is)(const Rule&, const Rule&)) {
  for (const Rule& a : p.rules)
    for (const Rule& b : q.rules)
      if (is(a, b)) return true;
  return false;
}

std::vector<std::string> pattern_overlaps(const std::vector<Pattern>& patterns) {
  std::vector<std::string> sentences;
  const auto compare = [&](const Pattern& p, const auto& with) {
    std::vector<std::string> others;
    for (const Pattern* other : with)
      if (any_rules(p, *other, overlap)) others.push_back(other->name);
    if (!others.empty())
      sentences.push_back(
          fmt::format("{} takes operators that {} would take too; it goes before", p.name, fmt::join(others, ", ")));
  };
  for (size_t i = 0; i < patterns.size(); ++i) {
    std::vector<const Pattern*> after;
    for (size_t j = i + 1; j < patterns.size(); ++j) after.push_back(&patterns[j]);
    for (const Pattern& other : all_patterns())
      if (other.by_default) after.push_back(&other);
    compare(patterns[i], after);
  }
  for (const Pattern& p : patterns)
    for (const Pattern& q : patterns)
      if (&p != &q && any_rules(p, q, matches_what_is_put))
        sentences.push_back(fmt::format("{} matches what {} puts in", p.name, q.name));
  return sentences;
}

}  // namespace tsmem
