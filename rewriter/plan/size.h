// Sizes as people write them.
#pragma once
#include <cstdint>
#include <string>

namespace tsmem {

// "2GiB", "1500 MB", "123456" or, of `whole` bytes, "40%". Throws Error for anything else; `option` is named. `whole`
// 0: no percentages.
int64_t parse_size(const std::string& text, const std::string& option, int64_t whole);

}  // namespace tsmem
