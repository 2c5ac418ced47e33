// Errors that end in one sentence for the user.
#pragma once
#include <stdexcept>
#include <string>

#include "tsmem/api.h"

namespace tsmem {

// request: what was asked for can't be done with this model (an unknown pattern or method, options that exclude each
// other, a file that exists). input: a file, a module or its arguments that can't be read, run or written. budget: no
// plan needs as little memory.
enum class ErrorKind { request, input, budget };

// what() is one sentence that says what is wrong and what to do; no stack trace.
struct TSMEM_API Error : std::runtime_error {
  Error(ErrorKind kind, const std::string& sentence) : std::runtime_error(sentence), kind(kind) {}
  ErrorKind kind;
};

}  // namespace tsmem
