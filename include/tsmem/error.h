// Errors that end in one sentence for the user.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>

#include "tsmem/api.h"

namespace tsmem {

// request: what was asked for can't be done with this model (an unknown pattern or method, options that exclude each
// other, a file that exists). input: a file, a module or its arguments that can't be read, run or written. budget: no
// plan needs as little memory.
enum class ErrorKind { request, input, budget };

// what() is one sentence that says what is wrong and what to do; no stack trace. `option`: the name of the option that
// helps ("ops", "force", "estimate", "link"), of the one to leave out ("budget", where no plan saves anything), or of
// the list to choose from ("modules", "patterns"), which a front end spells as its own; "": none does.
struct TSMEM_API Error : std::runtime_error {
  Error(ErrorKind kind, const std::string& sentence, std::string option = "")
      : std::runtime_error(sentence), kind(kind), option(std::move(option)) {}
  ErrorKind kind;
  std::string option;
};

}  // namespace tsmem
