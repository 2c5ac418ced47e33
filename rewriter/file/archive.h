// The zip archive that a TorchScript file is, checked before PyTorch reads it.
//
// torch::jit::load trusts sizes that it finds in a file: a broken or hostile one can end the process or ask for all
// memory. What can be known from outside is checked here: that the directory is whole, that every record lies inside
// the file and is there once, and that no record claims to be larger than its bytes can hold. What is in the records:
// check_file.h.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace tsmem {

struct Record {
  uint64_t size = 0, stored_size = 0, header_offset = 0;
  int method = 0;    // 0 stored, 8 deflated
  uint32_t crc = 0;  // of its bytes, as the directory says
};

struct Archive {
  std::map<std::string, Record> records;  // by their names below the archive's own directory: "code/__torch__.py"
  bool has(const std::string& name) const { return records.count(name) > 0; }
};

// Reads the directory of the zip file at `path`. Throws Error(ErrorKind::input) with one sentence where it is missing,
// unreadable, a directory, not a zip file, truncated or inconsistent. `what` names the kind of file in the sentence: "a
// TorchScript file".
Archive read_archive(const std::string& path, const std::string& what = "a TorchScript file");

// The bytes of a record that is stored (PyTorch deflates code and what belongs to it alone); "" for a deflated one.
std::string read_record(const std::string& path, const Record& record);

// The CRC-32 of such a record's bytes, read in pieces.
uint32_t checksum(const std::string& path, const Record& record);

}  // namespace tsmem
