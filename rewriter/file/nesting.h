// How deep TorchScript code is nested, found without parsing it.
#pragma once
#include <string>
#include <string_view>

namespace tsmem {

// LibTorch reads code, and walks what it has read, by recursion: code that is nested deep enough ends the process.
// Brackets, blocks, and operators that follow one another in one expression (not f(x), -x, a + b, a.b) count alike.
// What PyTorch writes stays below 100: it gives the parts of long expressions names of their own.
constexpr size_t kDeepestCode = 1000;

// Where code is nested deeper than kDeepestCode: half a sentence with the line's number. "" elsewhere.
std::string nesting_fault(std::string_view code);

}  // namespace tsmem
