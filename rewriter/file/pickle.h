// Pickles, walked without making anything of them.
//
// LibTorch's unpickler trusts what it reads: sizes, offsets and strides of tensors above all. This walks a pickle as
// the unpickler does (torch/csrc/jit/serialization/unpickler.cpp), opcode by opcode, with stand-ins for its values.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace tsmem {

constexpr size_t kDeepestPickle = 1000;  // values in values; a module in a module takes two

// The bytes of the record that holds the storage `key`; nothing where there is no such record.
using StorageBytes = std::function<std::optional<uint64_t>(const std::string& key)>;

// What is wrong with a pickle, as half a sentence, "" where the unpickler can be given it: every tensor lies in its
// record, every opcode finds what it takes, no value contains itself or is nested too deep, and no size asks for more
// memory than the pickle's bytes explain.
std::string pickle_fault(std::string_view pickle, const StorageBytes& storage_bytes);

// The same for a record of places in the source (code/*.debug_pkl), whose layout PyTorch doesn't check either. It is
// read only when a message or a saved file needs it.
std::string debug_fault(std::string_view pickle);

}  // namespace tsmem
