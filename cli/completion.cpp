// tsmem completion: scripts for bash, zsh and fish, generated from the parser, so that they know every option.
#include <fmt/format.h>

#include <memory>

#include "cli/cli.h"
#include "rewriter/error.h"

namespace tsmem::cli {
namespace {

struct Flag {
  std::vector<std::string> names;  // "-o", "--output"
  std::string what;
  bool takes_value;
  std::vector<std::string> values;  // where only these are possible
};

// CLI11 keeps the set of a CLI::IsMember in its description: "{auto,always,never}".
std::vector<std::string> members(const std::string& type_name) {
  auto open = type_name.find('{'), close = type_name.find('}');
  std::vector<std::string> values;
  if (open == std::string::npos || close == std::string::npos) return values;
  for (auto& value : CLI::detail::split(type_name.substr(open + 1, close - open - 1), ',')) values.push_back(value);
  return values;
}

std::vector<Flag> flags(const CLI::App& app) {
  std::vector<Flag> result;
  for (auto option : app.get_options()) {
    if (option->get_positional()) continue;
    Flag flag{{}, option->get_description(), option->get_items_expected_max() > 0, members(option->get_type_name())};
    for (auto& name : option->get_snames()) flag.names.push_back("-" + name);
    for (auto& name : option->get_lnames()) flag.names.push_back("--" + name);
    result.push_back(flag);
  }
  return result;
}

std::string joined(const std::vector<std::string>& words, const std::string& by) {
  std::string text;
  for (auto& word : words) text += (text.empty() ? "" : by) + word;
  return text;
}

std::string all_names(const std::vector<Flag>& flags) {
  std::string text;
  for (auto& flag : flags) text += (text.empty() ? "" : " ") + joined(flag.names, " ");
  return text;
}

// What may stand where no option does: fixed words, or files.
std::vector<std::string> words(const CLI::App& command) {
  for (auto option : command.get_options())
    if (option->get_positional())
      if (auto values = members(option->get_type_name()); !values.empty()) return values;
  return {};
}

std::vector<const CLI::App*> commands_of(const CLI::App& root) {
  return root.get_subcommands([](const CLI::App*) { return true; });
}

std::string bash(const CLI::App& root) {
  std::vector<std::string> names;
  std::string options, values;
  // Per command: its own options and the common ones; and the values of options that have a fixed set.
  auto common = flags(root);
  std::string with_value;
  auto add_values = [&](const std::string& command, const std::vector<Flag>& list) {
    for (auto& flag : list)
      for (auto& name : flag.names) {
        if (!flag.values.empty())
          values += fmt::format("    {}:{}) COMPREPLY=($(compgen -W \"{}\" -- \"$current\")); return;;\n", command,
                                name, joined(flag.values, " "));
        else if (flag.takes_value)
          with_value += fmt::format("{}{}:{}", with_value.empty() ? "" : "|", command, name);
      }
  };
  add_values("*", common);
  for (auto command : commands_of(root)) {
    auto own = flags(*command);
    names.push_back(command->get_name());
    options += fmt::format("    {}) options=\"{} {}\"; words=\"{}\";;\n", command->get_name(), all_names(own),
                           all_names(common), joined(words(*command), " "));
    add_values(command->get_name(), own);
  }
  return fmt::format(
      R"(# bash completion of tsmem: source this file, or put it in ~/.local/share/bash-completion/completions/tsmem
_tsmem() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" options="" words="" word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in {}) command="$word"; break;; esac
  done
  case "$command:$previous" in
{}    {}) COMPREPLY=($(compgen -f -- "$current")); return;;
  esac
  case "$command" in
    "") options="{}"; words="{}";;
{}  esac
  if [[ "$current" == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$current"))
  elif [[ -n "$words" ]]; then COMPREPLY=($(compgen -W "$words" -- "$current"))
  else COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _tsmem tsmem
)",
      joined(names, "|"), values, with_value, all_names(common), joined(names, " "), options);
}

// In single quotes; zsh's _arguments and fish both read them.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (char c : text) result += c == '\'' ? "'\\''" : std::string(1, c);
  return result + "'";
}

std::string zsh_spec(const Flag& flag) {
  std::string what, specs;
  for (char c : flag.what) what += c == '[' || c == ']' || c == ':' ? std::string("\\") + c : std::string(1, c);
  std::string value = !flag.values.empty() ? ":value:(" + joined(flag.values, " ") + ")"
                      : flag.takes_value   ? ":value:_files"
                                           : "";
  for (auto& name : flag.names) specs += " \\\n        " + quoted("*" + name + "[" + what + "]" + value);
  return specs;
}

std::string zsh(const CLI::App& root) {
  std::string list, cases, common;
  for (auto& flag : flags(root)) common += zsh_spec(flag);
  for (auto command : commands_of(root)) {
    std::string specs;
    for (auto& flag : flags(*command)) specs += zsh_spec(flag);
    auto fixed = words(*command);
    list += "    " + quoted(command->get_name() + ":" + command->get_description()) + "\n";
    cases += fmt::format("    {})\n      _arguments{}{} \\\n        '*:argument:{}' ;;\n", command->get_name(), specs,
                         common, fixed.empty() ? "_files" : "(" + joined(fixed, " ") + ")");
  }
  return fmt::format(R"(#compdef tsmem
# zsh completion of tsmem: put this file in a directory of $fpath, under the name _tsmem
_tsmem() {{
  local -a commands=(
{}  )
  local command="" word
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    if (( ${{commands[(I)$word:*]}} )); then command="$word"; break; fi
  done
  case "$command" in
{}    *)
      _arguments{} \
        '*:command:->command'
      _describe command commands ;;
  esac
}}
if [[ "$funcstack[1]" == _tsmem ]]; then _tsmem "$@"; else compdef _tsmem tsmem; fi
)",
                     list, cases, common);
}

std::string fish_line(const Flag& flag, const std::string& condition) {
  std::string line = "complete -c tsmem" + condition;
  for (auto& name : flag.names) line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  if (!flag.values.empty())
    line += " -x -a " + quoted(joined(flag.values, " "));
  else if (flag.takes_value)
    line += " -r";
  return line + " -d " + quoted(flag.what) + "\n";
}

std::string fish(const CLI::App& root) {
  std::string text = "# fish completion of tsmem: put this file in ~/.config/fish/completions/tsmem.fish\n";
  for (auto& flag : flags(root)) text += fish_line(flag, "");
  for (auto command : commands_of(root)) {
    auto& name = command->get_name();
    text += fmt::format("complete -c tsmem -n __fish_use_subcommand -f -a {} -d {}\n", name,
                        quoted(command->get_description()));
    std::string condition = " -n '__fish_seen_subcommand_from " + name + "'";
    for (auto& flag : flags(*command)) text += fish_line(flag, condition);
    if (auto fixed = words(*command); !fixed.empty())
      text += "complete -c tsmem" + condition + " -f -a " + quoted(joined(fixed, " ")) + "\n";
  }
  return text;
}

}  // namespace

std::string completion_script(const CLI::App& root, const std::string& shell) {
  if (shell == "bash") return bash(root);
  if (shell == "zsh") return zsh(root);
  if (shell == "fish") return fish(root);
  throw Error(ErrorKind::request,
              "There is no completion for '" + shell + "'" + did_you_mean(shell, {"bash", "zsh", "fish"}) + ".");
}

Run add_completion(CLI::App& app, const Common&) {
  auto shell = std::make_shared<std::string>();
  app.add_option("SHELL", *shell, "The shell that it is for")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  app.footer("Example: source <(tsmem completion bash)");
  return [shell, &app] {
    print(completion_script(*app.get_parent(), *shell));
    return kOk;
  };
}

}  // namespace tsmem::cli
