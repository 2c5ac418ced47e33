// One step of a recurrent cell over rows of a batch, forward and backward. Gates are in PyTorch's order: input, forget,
// cell, output (LSTM); reset, update, new (GRU). States of a cell are in the type that is computed in.
#pragma once
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/rows.h"

namespace tsmem {

struct RnnKernels {
  // gates [rows, 4 n]: pre-activations; with `before` they become activations, and `before` [rows, n] what c was.
  // c [rows, n] is updated. h: o tanh(c).
  void (*lstm_forward)(Dtype dtype, void* gates, void* c, void* before, MutableRows2d h, int64_t rows, int64_t n);
  // The cell alone, of gates that are activations: before becomes what c was, and c is updated.
  void (*lstm_cell)(Dtype dtype, const void* gates, void* c, void* before, int64_t rows, int64_t n);
  // gates: activations, which become gradients. c_before: the cell's state before the step. dh: the sum of both. dc
  // [rows, n] is updated.
  void (*lstm_backward)(Dtype dtype, void* gates, const void* c_before, Rows2d dh1, Rows2d dh2, void* dc, int64_t rows,
                        int64_t n);
  // gi, gh [rows, 3 n]: the input's and the hidden state's parts of the pre-activations. h: the new state; without it
  // gi becomes activations.
  void (*gru_forward)(Dtype dtype, void* gi, const void* gh, Rows2d before, MutableRows2d h, int64_t rows, int64_t n);
  // gi: activations, gh: as forward had it; both become gradients. dh [rows, n], a part of h's gradient beside dh1,
  // becomes the part of the state's before that is not by way of gh.
  void (*gru_backward)(Dtype dtype, void* gi, void* gh, Rows2d before, Rows2d dh1, void* dh, int64_t rows, int64_t n);
  // h = tanh or relu of g [rows, n].
  void (*rnn_forward)(Dtype dtype, bool relu, const void* g, MutableRows2d h, int64_t rows, int64_t n);
  // g: the gradient, of h and its gradients' sum.
  void (*rnn_backward)(Dtype dtype, bool relu, Rows2d h, Rows2d dh1, Rows2d dh2, void* g, int64_t rows, int64_t n);
};

const RnnKernels& rnn_kernels();

}  // namespace tsmem
