// A layer of a recurrent network, in one direction or both, as the raw ops take it.
#pragma once
#include "common.h"
#include "raw_op.h"

namespace tsmem {

enum class Cell : int64_t { lstm, gru, tanh, relu };

inline int64_t gates_of(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }

// What a layer's weights are, one direction after the other: w_ih, w_hh, b_ih and b_hh where there are biases, w_hr
// where the states are projected.
struct RnnWeights {
  at::Tensor ih, hh, b_ih, b_hh, hr;
};

inline int64_t weights_of_direction(bool biases, bool projects) { return 2 + 2 * biases + projects; }

// How many steps are computed again at once: about the root of all, and enough that their products of matrices are not
// small ones.
inline int64_t steps_of_chunk(int64_t steps, int64_t batch) {
  constexpr int64_t kRows = 512;
  const auto root = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(steps))));
  return std::min(steps, std::max(root, (kRows + batch - 1) / batch));
}

// Whether the gates stay: of LSTMs that PyTorch gives to oneDNN, which is so fast that recomputing them would be felt.
// It keeps far more.
inline bool keeps_gates(Cell cell, at::ScalarType type, bool packed, bool projects) {
  return cell == Cell::lstm && type == at::kFloat && !packed && !projects;
}

// _rnn_layer: input [T, B, D], or packed rows [N, D] with the batch size of each step, which never grows; hx [d, B,
// Hy], cx [d, B, H] for d directions. Returns the output [T, B, d Hy] or [N, d Hy], the last states, of an LSTM c where
// each chunk of steps begins, and its gates [d, N, 4 H] where they stay: all that backward needs beside the operands
// and the output.
using RnnLayerOp = RawOp<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor& input, at::IntArrayRef batch_sizes, const at::Tensor& hx, const OptTensor& cx,
    at::TensorList weights, int64_t cell, bool biases, bool bidirectional)>;

// _rnn_layer_backward: gradients of input, hx, cx and of each weight. Bit 0, 1, 2 and 3 + i of `want`: which; an empty
// tensor stands for the gradient of a weight that is not wanted. kTakesGates: nobody needs the gates after this, and
// their gradients are written in their place.
constexpr int64_t kTakesGates = int64_t{1} << 62;
using RnnLayerBackwardOp = RawOp<std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>>(
    const OptTensor& grad_out, const OptTensor& grad_hn, const OptTensor& grad_cn, const at::Tensor& input,
    at::IntArrayRef batch_sizes, const at::Tensor& hx, const OptTensor& cx, at::TensorList weights,
    const at::Tensor& out, const at::Tensor& borders, const at::Tensor& gates, int64_t cell, bool biases,
    bool bidirectional, int64_t want)>;

}  // namespace tsmem
