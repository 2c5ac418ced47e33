// The command line: parse, run, print.
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <new>

#include "cli/cli.h"
#include "rewriter/error.h"
#include "rewriter/file/check_file.h"
#include "rewriter/file/new_file.h"
#include "rewriter/file/op_library.h"

namespace tsmem::cli {
namespace {

struct Command {
  const char *name, *what;
  Run (*add)(CLI::App&, const Common&);
};

const Command commands[] = {
    {"rewrite", "Rewrite a model so that it needs less memory while it trains", add_rewrite},
    {"diff", "Show what differs between the graphs of two models", add_diff},
    {"profile", "Measure the memory and time of a training step", add_profile},
    {"verify", "Check that two models give the same numbers", add_verify},
    {"plan", "Show peak memory against step time", add_plan},
    {"import", "Make a TorchScript model that trains from a program of torch.export", add_import},
    {"inspect", "List modules, parameters, operators, and what would be rewritten", add_inspect},
    {"patterns", "List the rewrite patterns, or explain one", add_patterns},
    {"completion", "Print a completion script for a shell", add_completion},
};

class Warnings : c10::WarningHandler {  // PyTorch's: only for those who ask
 public:
  explicit Warnings(const Common& common) : common_(common) { c10::WarningUtils::set_warning_handler(this); }
  ~Warnings() override { c10::WarningUtils::set_warning_handler(nullptr); }
  void process(const c10::Warning& warning) override {
    if (common_.verbose) std::cerr << "warning: " << warning.msg() << "\n";
  }

 private:
  const Common& common_;
};

// What is being read, and the limits that hold meanwhile. Read by the handlers below: plain data, made beforehand.
struct BeingRead {
  std::string sentence;  // "tsmem: 'model.pt' can't be read: "
  int seconds = 0;
  rlimit cpu{}, memory{};
  volatile sig_atomic_t now = 0;
};
BeingRead being_read;

// Lowers a limit for as long as a file is read, unless it is lower already.
void lower(__rlimit_resource what, rlimit& before, uint64_t to) {
  getrlimit(what, &before);
  rlimit low = before;
  low.rlim_cur = std::min<rlim_t>(low.rlim_cur, to);
  setrlimit(what, &low);
}

// LibTorch's reader recurses, loops and allocates as a file tells it. What a file may make it do is checked before
// (rewriter/file/check_file.h); for what that leaves there are these limits, and on_crash. No process of its own is
// needed for them: this one does nothing else, and its outputs appear whole or not at all.
void while_reading(const char* path, int seconds, uint64_t bytes) {
  BeingRead& b = being_read;
  if (!path) {
    b.now = 0;
    setrlimit(RLIMIT_CPU, &b.cpu);
    setrlimit(RLIMIT_AS, &b.memory);
    return;
  }
  b.sentence = std::string("tsmem: '") + path + "' can't be read: ";
  b.seconds = seconds;
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  lower(RLIMIT_CPU, b.cpu, static_cast<uint64_t>(used.ru_utime.tv_sec + used.ru_stime.tv_sec + 1 + seconds));
  getrlimit(RLIMIT_AS, &b.memory);
  uint64_t pages = 0;
  // CUDA reserves addresses far beyond the memory that there is.
  if (!at::hasCUDA() && std::ifstream("/proc/self/statm") >> pages)
    lower(RLIMIT_AS, b.memory, pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + 3 * bytes + (uint64_t{4} << 30));
  b.now = 1;
}

void say(const char* text) { [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::strlen(text)); }

// A crash, or the end of the time for reading: a sentence and an exit code all the same. Nothing is called here that
// might wait for what was interrupted.
void on_crash(int number) {
  remove_temporary_file();
  const char* name = number == SIGSEGV  ? "SIGSEGV"
                     : number == SIGBUS ? "SIGBUS"
                     : number == SIGFPE ? "SIGFPE"
                     : number == SIGILL ? "SIGILL"
                                        : "SIGABRT";
  if (being_read.now) {
    say(being_read.sentence.c_str());
    if (number == SIGXCPU) {
      say("PyTorch takes far longer than with any model of its size; it is damaged, or made to do harm.\n");
    } else {
      say("PyTorch crashes on it (");
      say(name);
      say("); it is damaged, or made to do harm.\n");
    }
    _exit(kBadInput);
  }
  if (number == SIGXCPU) {
    std::signal(number, SIG_DFL);
    std::raise(number);
    return;
  }
  say("tsmem: It crashed (");
  say(name);
  say(").\nThis is a bug in tsmem " TSMEM_VERSION " (LibTorch " TORCH_VERSION
      "). Please report it with this message, the command line, and the model or the code that makes it.\n");
  _exit(kBug);
}

void on_signal(int number) {
  remove_temporary_file();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void handle_signals() {
  // Deep recursion needs what `ulimit -s` may not give; the handler a stack of its own, when there was none left.
  rlimit depth{};
  getrlimit(RLIMIT_STACK, &depth);
  depth.rlim_cur = std::max(depth.rlim_cur, std::min<rlim_t>(depth.rlim_max, 64 << 20));
  setrlimit(RLIMIT_STACK, &depth);
  static char handlers_stack[64 << 10];
  const stack_t stack{handlers_stack, 0, sizeof handlers_stack};
  sigaltstack(&stack, nullptr);
  struct sigaction crash {};
  crash.sa_handler = on_crash;
  crash.sa_flags = SA_ONSTACK | static_cast<int>(SA_RESETHAND);
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGXCPU}) sigaction(number, &crash, nullptr);
  std::set_terminate([] { std::abort(); });  // without words of its own
  on_reading = while_reading;

  std::signal(SIGPIPE, SIG_IGN);  // writes fail instead, which print() knows
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then a full disk
  for (int number : {SIGINT, SIGTERM, SIGHUP})
    if (std::signal(number, on_signal) == SIG_IGN) std::signal(number, SIG_IGN);  // nohup
}

std::vector<std::string> option_names(const CLI::App& root) {
  std::vector<std::string> names;
  auto add = [&](const CLI::App* app) {
    for (auto option : app->get_options())
      for (auto& name : option->get_lnames()) names.push_back("--" + name);
  };
  add(&root);
  for (auto command : root.get_subcommands()) add(command);
  return names;
}

// CLI11's message as a sentence, with a guess at what was meant.
std::string usage_error(const CLI::App& root, const CLI::ParseError& error) {
  auto parsed = root.get_subcommands();
  auto rest = root.remaining(true);
  for (auto& word : rest)
    if (word.size() > 1 && word[0] == '-' && word != "--") {
      auto name = word.substr(0, word.find('='));
      return "There is no option " + name + did_you_mean(name, option_names(root)) + ".";
    }
  if (parsed.empty()) {
    std::vector<std::string> names;
    for (auto& command : commands) names.push_back(command.name);
    if (rest.empty()) return "Say what to do: " + enumerate(names) + ".";
    return "There is no command '" + rest[0] + "'" + did_you_mean(rest[0], names) + ".";
  }
  if (!rest.empty() && dynamic_cast<const CLI::ExtrasError*>(&error))
    return "There is an argument too many: '" + rest[0] + "'.";
  std::string text = error.what();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error)) return text.substr(0, text.find(':')) + " needs a value.";
  if (text.starts_with("Could not convert: ")) {
    auto equals = text.find(" = ");
    return text.substr(19, equals - 19) + " can't be '" + text.substr(equals == text.npos ? text.size() : equals + 3) +
           "'.";
  }
  text = text.substr(0, text.find('\n'));
  return text;
}

std::string with_stop(std::string text) {
  if (!text.empty() && !std::strchr(".!?", text.back())) text += '.';
  return text;
}

int run(int argc, char** argv) {
  Common common;
  CLI::App app("Makes TorchScript models need less memory while they train.", "tsmem");
  app.footer("Example: tsmem rewrite model.pt -o model.mem.pt\n\nEvery command has its own help: tsmem rewrite --help");
  app.set_version_flag("--version", "tsmem " TSMEM_VERSION " (LibTorch " TORCH_VERSION ")",
                       "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(1)->fallthrough();
  app.add_option("--seed", common.seed, "Seed of random inputs (default 0)")->check(whole_number(0, UINT64_MAX));
  app.add_flag("-v,--verbose", common.verbose, "Print more");
  app.add_flag("-q,--quiet", common.quiet, "Print errors and results alone");
  app.add_option("--color", common.color, "auto, always or never")->check(CLI::IsMember({"auto", "always", "never"}));
  app.add_option("--ops", common.op_libraries, "A library of custom operators that the model needs; repeatable")
      ->type_name("LIB.so")
      ->allow_extra_args(false);
  std::vector<std::pair<CLI::App*, Run>> runs;
  for (auto& command : commands) {
    auto sub = app.add_subcommand(command.name, command.what);
    runs.emplace_back(sub, command.add(*sub, common));
    sub->footer(sub->get_footer() + "\n\nEvery command takes --seed, -v, -q, --color and --ops too: tsmem --help");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    auto used = app.get_subcommands();
    std::cerr << "tsmem: " << with_stop(usage_error(app, error)) << "\nSee: tsmem "
              << (used.empty() ? "" : used[0]->get_name() + " ") << "--help\n";
    return kUsage;
  }
  Warnings warnings(common);
  for (auto& library : common.op_libraries) load_op_library(library);
  int code = kOk;
  for (auto& [command, action] : runs)
    if (command->parsed()) code = action();
  return code;
}

// The sentence, with the option or the command that helps as it is spelled here.
std::string with_advice(const Error& e) {
  static const std::map<std::string, const char*> advice = {
      {"ops", "name the library that defines it with --ops LIB.so"},
      {"force", "use --force to replace it"},
      {"estimate", "leave --estimate out"},
      {"link", "--link 25GB, for example"},
      {"modules", "'tsmem inspect' lists them"},
      {"patterns", "'tsmem patterns' lists them"},
  };
  std::string text = e.what();
  const auto known = advice.find(e.option);
  if (known == advice.end()) return with_stop(text);
  while (text.ends_with('.')) text.pop_back();
  return text + "; " + known->second + ".";
}

bool out_of_memory(const std::exception& e) {
  return dynamic_cast<const std::bad_alloc*>(&e) || dynamic_cast<const c10::OutOfMemoryError*>(&e) ||
         std::string_view(e.what()).find("can't allocate memory") != std::string_view::npos;
}

}  // namespace
}  // namespace tsmem::cli

int main(int argc, char** argv) {
  using namespace tsmem;
  cli::handle_signals();
  try {
    int code = cli::run(argc, argv);
    cli::print("");  // what is still in the buffer
    return code;
  } catch (const Error& e) {
    std::cerr << "tsmem: " << cli::with_advice(e) << "\n";
    return cli::exit_code(e.kind);
  } catch (const std::exception& e) {
    if (cli::out_of_memory(e)) {
      std::cerr << "tsmem: There is not enough memory for this model and these inputs.\n";
      return cli::kBadInput;
    }
    std::cerr << "tsmem: " << cli::with_stop(sentence(e))
              << "\nThis is a bug in tsmem " TSMEM_VERSION " (LibTorch " TORCH_VERSION
              << "). Please report it with this message, the command line, and the model or the code that makes it.\n";
    return cli::kBug;
  }
}
