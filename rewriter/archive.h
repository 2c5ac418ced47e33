// The zip archive that a TorchScript file is, checked before PyTorch reads it.
//
// torch::jit::load trusts sizes that it finds in a file: a broken or hostile one can end the process or ask for all
// memory. What can be known from outside is checked here: that the directory is whole, that every record lies inside
// the file, that no record claims to be larger than its bytes can hold, and that no pickle asks for more than it has
// bytes.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace tsmem {

struct Record {
  uint64_t size = 0, stored_size = 0, header_offset = 0;
  int method = 0;  // 0 stored, 8 deflated
};

struct Archive {
  std::map<std::string, Record> records;  // by their names below the archive's own directory: "code/__torch__.py"
  bool has(const std::string& name) const { return records.count(name) > 0; }
};

// Reads the directory of the zip file at `path`. Throws Error(kBadInput) with one sentence where it is missing,
// unreadable, a directory, not a zip file, truncated or inconsistent. `what` names the kind of file in the sentence: "a
// TorchScript file".
Archive read_archive(const std::string& path, const std::string& what = "a TorchScript file");

// The bytes of a record that is stored (PyTorch stores all that it writes); "" for a deflated one.
std::string read_record(const std::string& path, const Record& record);

// Walks a pickle without running it. Returns what is wrong with it, "" where PyTorch can read it without asking for
// more memory than the pickle has bytes, or taking more from its stack than is there. Opcodes that PyTorch doesn't know
// are left to it.
std::string pickle_fault(const std::string& pickle);

}  // namespace tsmem
