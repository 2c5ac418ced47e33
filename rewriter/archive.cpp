#include "rewriter/archive.h"

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>

#include "rewriter/crc32.h"
#include "rewriter/error.h"

namespace tsmem {
namespace {

// Little-endian numbers.
uint64_t number(const char* at, int bytes) {
  uint64_t n = 0;
  for (int i = bytes - 1; i >= 0; --i) n = n << 8 | static_cast<unsigned char>(at[i]);
  return n;
}

struct Bytes {  // a file, read at any place
  std::ifstream file;
  uint64_t size = 0;

  // False where the range is not all inside the file.
  bool read(uint64_t offset, uint64_t length, std::string& into) {
    if (offset > size || length > size - offset) return false;
    into.resize(length);
    file.clear();
    file.seekg(static_cast<std::streamoff>(offset));
    return static_cast<bool>(file.read(into.data(), static_cast<std::streamsize>(length)));
  }
};

Bytes open_file(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0)
    throw Error(ErrorKind::input, "Can't read '" + path + "': " + std::strerror(errno) + ".");
  if (S_ISDIR(status.st_mode)) throw Error(ErrorKind::input, "'" + path + "' is a directory, not a file.");
  if (!S_ISREG(status.st_mode)) throw Error(ErrorKind::input, "'" + path + "' is not a regular file.");
  Bytes bytes{std::ifstream(path, std::ios::binary), static_cast<uint64_t>(status.st_size)};
  if (!bytes.file) throw Error(ErrorKind::input, "Can't read '" + path + "': " + std::strerror(errno) + ".");
  return bytes;
}

// Sizes and places that do not fit in 32 bits stand in the zip64 field, in this order, where the 32-bit one is all
// ones.
void read_zip64(const std::string& extra, Record& record) {
  for (size_t at = 0; at + 4 <= extra.size();) {
    size_t id = number(&extra[at], 2), length = number(&extra[at + 2], 2), end = at + 4 + length;
    if (id == 1 && end <= extra.size()) {
      size_t field = at + 4;
      for (auto value : {&record.size, &record.stored_size, &record.header_offset}) {
        if (*value == 0xffffffffu && field + 8 <= end) {
          *value = number(&extra[field], 8);
          field += 8;
        }
      }
      return;
    }
    at = end;
  }
}

constexpr size_t kEndSize = 22, kLocatorSize = 20, kEntrySize = 46, kHeaderSize = 30, kLongestComment = 65535;
constexpr uint64_t kLargeDeflated = 64 << 20;

// The faults of an archive, with its name.
struct Broken {
  const std::string& path;
  Error operator()(const std::string& why) const {
    return Error(ErrorKind::input, "'" + path + "' is damaged: " + why + "; copy or save it again.");
  }
};

// Where a zip's directory is, from the end of the file.
struct DirectoryPlace {
  uint64_t count, size, offset;
};

DirectoryPlace find_directory(Bytes& bytes, const std::string& path, const std::string& what) {
  const Broken broken{path};
  if (bytes.size == 0) throw Error(ErrorKind::input, "'" + path + "' is empty, not " + what + ".");
  std::string start, tail;
  if (!bytes.read(0, std::min<uint64_t>(bytes.size, 16), start)) throw broken("it can't be read");
  const size_t tail_size = std::min<uint64_t>(bytes.size, kEndSize + kLongestComment);
  if (!bytes.read(bytes.size - tail_size, tail_size, tail)) throw broken("it can't be read");
  const size_t end = tail.rfind("PK\x05\x06");
  if (end == tail.npos || end + kEndSize > tail.size()) {
    if (start.starts_with("PK\x03\x04")) throw broken("it is a zip file whose end, with the directory, is missing");
    // torch.save's format before PyTorch 1.6: a pickle of protocol 2 that begins with a ten-byte magic number.
    if (start.starts_with("\x80\x02\x8a\x0a"))
      throw Error(ErrorKind::input,
                  "'" + path +
                      "' was written by torch.save (a state_dict or a pickled model), not TorchScript; script the " +
                      "model in Python: torch.jit.script(model).save(\"model.pt\").");
    throw Error(ErrorKind::input, "'" + path + "' is not " + what + ": it isn't a zip archive.");
  }
  if (end < kLocatorSize || tail.compare(end - kLocatorSize, 4, "PK\x06\x07") != 0)
    return {number(&tail[end + 10], 2), number(&tail[end + 12], 4), number(&tail[end + 16], 4)};
  std::string end64;
  if (!bytes.read(number(&tail[end - kLocatorSize + 8], 8), 56, end64) || !end64.starts_with("PK\x06\x06"))
    throw broken("the end of its zip directory is not where it should be");
  return {number(&end64[32], 8), number(&end64[40], 8), number(&end64[48], 8)};
}

// The directory's entry at `at`, which is moved behind it.
std::pair<std::string, Record> read_entry(const std::string& directory, size_t& at, const Broken& broken) {
  if (at + kEntrySize > directory.size() || directory.compare(at, 4, "PK\x01\x02") != 0)
    throw broken("its zip directory is shorter than it says");
  Record record{number(&directory[at + 24], 4), number(&directory[at + 20], 4), number(&directory[at + 42], 4),
                static_cast<int>(number(&directory[at + 10], 2)),
                static_cast<uint32_t>(number(&directory[at + 16], 4))};
  const size_t name_size = number(&directory[at + 28], 2), extra_size = number(&directory[at + 30], 2),
               comment_size = number(&directory[at + 32], 2);
  const size_t next = at + kEntrySize + name_size + extra_size + comment_size;
  if (next > directory.size()) throw broken("its zip directory is shorter than it says");
  std::string name = directory.substr(at + kEntrySize, name_size);
  read_zip64(directory.substr(at + kEntrySize + name_size, extra_size), record);
  at = next;
  if (name.find('\0') != name.npos) throw broken("a record's name has a zero byte");
  return {std::move(name), record};
}

// Throws where a record is not what the directory says, or can't be what PyTorch writes.
void check_record(Bytes& bytes, const std::string& name, const Record& record, const Broken& broken) {
  std::string header;
  if (!bytes.read(record.header_offset, kHeaderSize, header) || !header.starts_with("PK\x03\x04"))
    throw broken("record '" + name + "' is not where its zip directory says");
  const uint64_t data = record.header_offset + kHeaderSize + number(&header[26], 2) + number(&header[28], 2);
  if (data > bytes.size || record.stored_size > bytes.size - data)
    throw broken("record '" + name + "' reaches beyond the end of the file");
  // Deflate makes at most 1032 bytes of one.
  const bool possible = record.method == 0   ? record.size == record.stored_size
                        : record.method == 8 ? record.size / 1032 <= record.stored_size
                                             : false;
  if (!possible) throw broken("record '" + name + "' has an impossible size or an unknown compression");
  // PyTorch deflates code, and the places in the source that belong to it, which shrink to a tenth.
  if (record.method == 8 && record.size > kLargeDeflated && record.size / 100 > record.stored_size)
    throw broken("record '" + name + "' would become " + std::to_string(record.size >> 20) + " MiB out of " +
                 std::to_string(record.stored_size >> 10) + " KiB, as nothing does that PyTorch writes");
}

// LibTorch looks records up without regard to case. Of code it does so too, where classes may differ in case alone.
std::string looked_up_as(std::string inner) {
  if (!inner.starts_with("code/") && !inner.starts_with("extra/"))
    std::transform(inner.begin(), inner.end(), inner.begin(), [](unsigned char c) { return std::tolower(c); });
  return inner;
}

}  // namespace

Archive read_archive(const std::string& path, const std::string& what) {
  Bytes bytes = open_file(path);
  const Broken broken{path};
  const DirectoryPlace place = find_directory(bytes, path, what);
  std::string directory;
  if (!bytes.read(place.offset, place.size, directory)) throw broken("its zip directory lies outside the file");
  Archive archive;
  std::set<std::string> names;
  uint64_t sum = 0;
  size_t at = 0;
  for (uint64_t i = 0; i < place.count; ++i) {
    const auto [name, record] = read_entry(directory, at, broken);
    check_record(bytes, name, record, broken);
    sum += record.stored_size;
    if (sum > bytes.size) throw broken("its records overlap");
    const size_t slash = name.find('/');
    const std::string inner = slash == name.npos ? name : name.substr(slash + 1);
    if (!names.insert(looked_up_as(inner)).second) throw broken("there are two records '" + inner + "'");
    archive.records[inner] = record;
  }
  return archive;
}

namespace {

// Calls `take` with the pieces of a stored record.
template <class Take>
void read_pieces(const std::string& path, const Record& record, uint64_t most, const Take& take) {
  auto bytes = open_file(path);
  std::string header, piece;
  bool good = bytes.read(record.header_offset, kHeaderSize, header);
  uint64_t at = good ? record.header_offset + kHeaderSize + number(&header[26], 2) + number(&header[28], 2) : 0;
  for (uint64_t left = record.size; good && left > 0; left -= piece.size(), at += piece.size()) {
    good = bytes.read(at, std::min(left, most), piece);
    if (good) take(piece);
  }
  if (!good) throw Error(ErrorKind::input, "Can't read '" + path + "'.");
}

}  // namespace

std::string read_record(const std::string& path, const Record& record) {
  std::string data;
  if (record.method == 0) read_pieces(path, record, record.size, [&](const std::string& piece) { data = piece; });
  return data;
}

uint32_t checksum(const std::string& path, const Record& record) {
  uint32_t crc = 0;
  read_pieces(path, record, 1 << 20, [&](const std::string& piece) { crc = crc32(crc, piece.data(), piece.size()); });
  return crc;
}

}  // namespace tsmem
