// What PyTorch would trust in the records of a file, checked before it reads them; and what it leaves unchecked, after.
#pragma once
#include <torch/csrc/jit/api/module.h>

#include <string>

#include "rewriter/file/archive.h"

namespace tsmem {

// Throws Error(ErrorKind::input), which names the record, where its bytes are not those that were written (CRC-32), a
// tensor reaches beyond its record, or code, values or types are nested too deep. `tensors_alone`: a file of
// torch.save.
void check_records(const std::string& path, const Archive& archive, bool tensors_alone = false);

// Throws Error(ErrorKind::input) where an attribute is not of the type that its class says, or where the model has
// attributes or methods of its own under names that are reserved for rewritten models.
void check_module(const std::string& path, const torch::jit::Module& module);

// How long PyTorch may take to read such a file, in seconds of CPU time: many times what it takes.
int reading_seconds(const Archive& archive);

// Set by a program that limits what reading a file may take, and has a word for those that PyTorch crashes on. Called
// with the file's name, reading_seconds() and its bytes before PyTorch reads it, and with nullptr when it has.
extern void (*on_reading)(const char* path, int seconds, uint64_t bytes);

// Calls on_reading for as long as it lives.
struct Reading {
  Reading(const std::string& path, const Archive& archive);
  ~Reading();
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
};

}  // namespace tsmem
