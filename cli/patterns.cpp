// tsmem patterns: the list of them, or one in detail.
#include <memory>
#include <sstream>

#include "cli.h"
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

void show_pattern(const std::string& name, bool color) {
  std::vector<std::string> names;
  for (auto& pattern : all_patterns()) {
    names.push_back(pattern.name);
    if (pattern.name != name) continue;
    auto title = [&](const std::string& text) { return paint(text, Color::bold, color) + "\n"; };
    print(title(pattern.name) + "  " + pattern.algebra + "\n\n");
    print(title("Kept for backward") + indented(pattern.keeps, "  ") + "\n");
    print(title("Conditions") + indented(pattern.conditions, "  "));
    if (!pattern.by_default) print("  Used only when --only " + name + " names it.\n");
    for (auto& rule : pattern.rules) {
      print("\n" + title("Replaces") + indented(rule.match, "  "));
      print(title("by") + indented(rule.rewrite, "  "));
    }
    return;
  }
  throw Error(ErrorKind::request,
              "There is no pattern '" + name + "'" + did_you_mean(name, names) + "; 'tsmem patterns' lists them.");
}

}  // namespace

Run add_patterns(CLI::App& app, const Common& common) {
  auto name = std::make_shared<std::string>();
  app.add_option("NAME", *name, "A pattern's name");
  app.footer("Example: tsmem patterns bn-act");
  return [name, &common] {
    if (name->empty())
      list_patterns(use_color(common));
    else
      show_pattern(*name, use_color(common));
    return kOk;
  };
}

}  // namespace tsmem::cli
