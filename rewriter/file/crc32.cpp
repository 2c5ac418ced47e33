#include "rewriter/file/crc32.h"

#include <array>
#include <cstring>

namespace tsmem {
namespace {

// tables[k][b]: what byte b does to the checksum once k more bytes have passed. With eight tables eight bytes are taken
// in one step, which is several times as fast as one by one: models are gigabytes.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables make_tables() {
  Tables t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    t[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b) t[k][b] = t[k - 1][b] >> 8 ^ t[0][t[k - 1][b] & 0xff];
  return t;
}

}  // namespace

uint32_t crc32(uint32_t before, const char* data, size_t size) {
  static const Tables t = make_tables();
  uint32_t crc = ~before;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);  // the first byte lowest, on every machine that LibTorch is built for
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= t[7 - k][word >> 8 * k & 0xff];
  }
  for (; size > 0; ++data, --size) crc = crc >> 8 ^ t[0][(crc ^ static_cast<unsigned char>(*data)) & 0xff];
  return ~crc;
}

}  // namespace tsmem
