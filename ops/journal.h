// What a planner is told of a training step.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "recompute.h"

namespace tsmem {

// Every value that an op could offer, in forward's order.
struct Journal {
  struct Value {
    int64_t site;  // of the op's argument `recompute`; -1: none
    int64_t bytes;
    double flops;                                       // not 0: expensive
    double seconds = 0;                                 // to make it, where `timed`
    std::vector<int> operands;                          // values, by index
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // alive while somebody holds the output
  };
  struct Use {
    int value, at;  // a node that was made when there were `at` values needs this one in backward
  };
  bool timed = false;   // make every value twice more, and note the shorter time
  bool closed = false;  // forward is over: what runs again in backward is not noted
  std::vector<Value> values;
  std::vector<Use> uses;
  // After a value was noted, with its index; and where the backward of a node begins, with `at` as in Use.
  std::function<void(int at, bool backward)> mark;
};

// While it lives, the journal is told what this thread runs forward, and what backward does with it; the innermost one
// alone. For one training step.
class __attribute__((visibility("default"))) JournalGuard {
 public:
  explicit JournalGuard(Journal& journal);
  ~JournalGuard();
  JournalGuard(const JournalGuard&) = delete;
  JournalGuard& operator=(const JournalGuard&) = delete;

 private:
  std::shared_ptr<Journal*> outer_;
};

// This thread's journal; null: none, or one that has ended. Backward, on whatever thread, finds it by its nodes; they
// may outlive the journal, which is null then.
std::shared_ptr<Journal*> current_journal();

// What is to be noted in now, or nullptr.
Journal* noting();

// Notes a value that an op could offer; returns its index.
int note(Journal* journal, const at::Tensor& output, const std::vector<at::Tensor>& operands, const Make& make,
         int64_t site, double flops);

}  // namespace tsmem
