// Errors that end in one sentence for the user and in an exit code.
#pragma once
#include <functional>
#include <stdexcept>
#include <string>

namespace tsmem {

// The exit codes of the command line tool.
enum Exit : int { kOk = 0, kDifferent = 1, kUsage = 2, kBadInput = 3, kBudget = 4, kBug = 70 };

// what() is one sentence that says what is wrong and what to do; no stack trace.
struct Error : std::runtime_error {
  Error(Exit code, const std::string& sentence) : std::runtime_error(sentence), code(code) {}
  Exit code;
};

// The first sentence of any exception's text, c10::Error's backtrace and TorchScript's source excerpts left out.
std::string sentence(const std::exception& e);

// Does work on what a user's file holds: where LibTorch can't do something with it, that is no bug of ours but
// Error(kBadInput), "WHAT: LibTorch's sentence". Memory that runs out stays what it is.
void on_users_values(const std::string& what, const std::function<void()>& work);

}  // namespace tsmem
