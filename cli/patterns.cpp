// tsmem patterns: the list of them, or one in detail.
#include <fmt/format.h>

#include <memory>
#include <sstream>

#include "cli/cli.h"
#include "patterns/pattern.h"
#include "rewriter/error.h"

namespace tsmem::cli {
namespace {

std::string indented(const std::string& text, const std::string& by) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) result += by + line + "\n";
  return result;
}

void list_patterns(bool color) {
  std::vector<std::vector<std::string>> rows = {{"pattern", "what it computes"}};
  for (auto& pattern : all_patterns())
    rows.push_back({pattern.name + (pattern.by_default ? "" : " *"), pattern.algebra});
  print(table(rows));
  print("\n* used only when --only names it. More about one: " + paint("tsmem patterns NAME", Color::bold, color) +
        "\n");
}

constexpr size_t kTooMany = 100, kFirst = 12;  // rules of a pattern to print

void show(const Pattern& pattern, bool color) {
  auto title = [&](const std::string& text) { return paint(text, Color::bold, color) + "\n"; };
  print(title(pattern.name) + "  " + pattern.algebra + "\n\n");
  print(title("Saved for backward") + indented(pattern.keeps, "  ") + "\n");
  print(title("Conditions") + indented(pattern.conditions, "  "));
  if (!pattern.by_default) print("  Used only when --only " + pattern.name + " names it.\n");
  const size_t all = pattern.rules.size(), shown = all > kTooMany ? kFirst : all;
  for (size_t i = 0; i < shown; ++i) {
    const Rule& rule = pattern.rules[i];
    print("\n" + title("Replaces") + indented(rule.match, "  "));
    print(title("by") + indented(rule.rewrite, "  "));
  }
  if (shown < all) print(fmt::format("\nand {} other spellings of it.\n", all - shown));
}

void show_pattern(const std::string& name, bool color) {
  std::vector<std::string> names;
  for (auto& pattern : all_patterns()) {
    names.push_back(pattern.name);
    if (pattern.name == name) return show(pattern, color);
  }
  throw Error(ErrorKind::request,
              "There is no pattern '" + name + "'" + did_you_mean(name, names) + "; 'tsmem patterns' lists them.");
}

void check_file(const std::string& file, const Common& common) {
  const auto patterns = tsmem::read_patterns(file);
  if (common.quiet) return;
  std::vector<std::vector<std::string>> rows = {{"pattern", "what it computes", "saved for backward"}};
  for (auto& p : patterns) rows.push_back({p.name, p.algebra, p.keeps});
  print(table(rows));
  for (auto& sentence : pattern_overlaps(patterns)) print("Note: " + sentence + ".\n");
  print(file + ": " + counted(patterns.size(), "pattern") + ", no fault\n");
}

}  // namespace

Run add_patterns(CLI::App& app, const Common& common) {
  auto name = std::make_shared<std::string>(), file = std::make_shared<std::string>();
  auto* one = app.add_option("NAME", *name, "A pattern's name");
  app.add_option("--check", *file,
                 "Say what is wrong in a file of your own patterns, or nothing is; --ops loads their operators")
      ->type_name("FILE")
      ->excludes(one);
  app.footer(
      "Examples: tsmem patterns bn-act\n"
      "          tsmem patterns --check mine.patterns --ops libmine.so");
  return [name, file, &common] {
    if (!file->empty())
      check_file(*file, common);
    else if (name->empty())
      list_patterns(use_color(common));
    else
      show_pattern(*name, use_color(common));
    return kOk;
  };
}

}  // namespace tsmem::cli
