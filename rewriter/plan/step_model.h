// What a planner knows of one training step, as plain data: the values that forward computes, who needs them when, and
// what recomputing them costs. The bytes and seconds of a step under any choice follow from it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tsmem {

// What estimates take a device for.
constexpr double kFlopsPerSecond = 1e11;

// A site is an output in the rewritten module that is kept or recomputed, everywhere it is computed. A choice says of
// every site whether backward recomputes it. The base choice recomputes all that is not expensive.
struct StepModel {
  // A stretch of the step, from one event to the next: in forward a value has been computed, in backward that of a node
  // begins.
  struct Slot {
    int at;         // forward: the value that was computed last; backward: how many there were when the node was made
    bool backward;  // else forward
    int64_t peak;   // bytes, under the base choice
    int64_t correction = 0;  // bytes that steps under other choices needed beyond what was predicted
  };

  struct Value {
    int site = -1;           // -1: none, it is always recomputed
    bool fixed = false;      // somebody else holds it anyway: nothing to choose
    bool expensive = false;  // recomputed once, and then held until its own layer's backward; else once for each reader
    int64_t bytes = 0;
    double seconds = 0, flops = 0;     // to compute it, from its operands
    std::vector<int> operands, users;  // other values
    std::vector<int> read_in;          // slots whose backward reads it, ascending
    int last_forward = 0;              // the last value that forward computes from it
    int end = 0;                       // it is gone from this slot on; set by complete()
  };

  struct Site {
    bool expensive = false;
    bool open = false;              // there is something to choose; set by complete(), as the rest
    double seconds = 0, flops = 0;  // that recomputing it adds to a step
  };

  std::vector<Slot> slots;    // forward's, then backward's
  size_t first_backward = 0;  // slot
  std::vector<Value> values;  // in forward's order
  std::vector<Site> sites;
  double seconds = 0;  // of a step under the base choice
};

// Appends a value, whose operands are there already, and makes it one of their users. Returns its index.
int add_value(StepModel& model, StepModel::Value value);

// Fills in what follows from the values and slots: when values are gone, and what recomputing each site costs.
void complete(StepModel& model);

std::vector<bool> base_choice(const StepModel& model);

double predicted_seconds(const StepModel& model, const std::vector<bool>& recomputed);

// The bytes of each slot.
std::vector<double> predicted_bytes(const StepModel& model, const std::vector<bool>& recomputed);

double predicted_peak(const StepModel& model, const std::vector<bool>& recomputed);

// needs[v][t]: the backward of slot `first_backward + t` reads value v, or something that is recomputed from it.
// `recomputed`: the choice; empty: everything is recomputed. `window`: only what is recomputed at most so many slots
// before its end.
std::vector<std::vector<char>> needs(const StepModel& model, const std::vector<bool>& recomputed, size_t window);

}  // namespace tsmem
