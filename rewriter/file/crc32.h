// The checksum of zip archives.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tsmem {

// The CRC-32 of some bytes that follow others whose CRC-32 is `before`; 0 where there are none.
uint32_t crc32(uint32_t before, const char* data, size_t size);

}  // namespace tsmem
