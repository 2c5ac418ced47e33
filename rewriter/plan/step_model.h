// What a planner knows of one training step, as plain data: the values that forward computes, who needs them when, and
// what recomputing them costs. The bytes and seconds of a step under any choice follow from it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tsmem/plan.h"

namespace tsmem {

// What estimates take a device for.
constexpr double kFlopsPerSecond = 1e11;

// A site is an output in the rewritten module that is kept, recomputed or offloaded, everywhere it is computed, as a
// choice says. The base choice recomputes all that is not expensive, and offloads nothing.
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
    int end = 0;                       // it is gone from this slot on; set by complete(), as the rest
    // Offloaded, it is there in forward until this value is computed, and in backward from one slot to the other.
    int left = 0, fetched = 0, dropped = 0;
  };

  struct Site {
    bool expensive = false;
    bool open = false;              // there is something to choose; set by complete(), as the rest
    double seconds = 0, flops = 0;  // that recomputing it adds to a step
    int64_t bytes = 0;              // of its values
    double link_seconds = 0;        // that offloading it takes on the link, each way; 0: it can't be
  };

  std::vector<Slot> slots;    // forward's, then backward's
  size_t first_backward = 0;  // slot
  std::vector<Value> values;  // in forward's order
  std::vector<Site> sites;
  double seconds = 0;        // of a step under the base choice
  double link = 0;           // bytes a second, each way; 0: nothing is offloaded
  double forward = 1.0 / 3;  // its part of a step's seconds
};

// Whether a value that is offloaded is there in a slot, beyond what forward and backward need it for.
bool is_there(const StepModel& model, const StepModel::Value& offloaded, size_t slot);

// Appends a value, whose operands are there already, and makes it one of their users. Returns its index.
int add_value(StepModel& model, StepModel::Value value);

// Fills in what follows from the values and slots: when values are gone, and what recomputing each site costs.
void complete(StepModel& model);

Choice base_choice(const StepModel& model);

// Copies run beside everything else: only what they take beyond forward, or beyond backward, is waited for.
double predicted_seconds(const StepModel& model, const Choice& choice);

// The bytes of each slot.
std::vector<double> predicted_bytes(const StepModel& model, const Choice& choice);

double predicted_peak(const StepModel& model, const Choice& choice);

// needs[v][t]: the backward of slot `first_backward + t` reads value v, or something that is recomputed from it.
// An empty choice: everything is recomputed. `window`: only what is recomputed at most so many slots before its end.
std::vector<std::vector<char>> needs(const StepModel& model, const Choice& choice, size_t window);

}  // namespace tsmem
