// What becomes of other libraries' exceptions.
#pragma once
#include <functional>
#include <string>

#include "tsmem/error.h"

namespace tsmem {

// The first sentence of any exception's text, c10::Error's backtrace and TorchScript's source excerpts left out.
std::string sentence(const std::exception& e);

// Does work on what a user's file holds: where LibTorch can't do something with it, that is no bug of ours but
// ErrorKind::input, "WHAT: LibTorch's sentence". Memory that runs out stays what it is.
void on_users_values(const std::string& what, const std::function<void()>& work);

}  // namespace tsmem
