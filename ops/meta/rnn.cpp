// Shapes of the raw recurrent ops' results.
#include "rnn_layer.h"

#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rnn_layer_meta(const Tensor& input, at::IntArrayRef batch_sizes,
                                                                  const Tensor& hx, const OptTensor& cx, at::TensorList,
                                                                  int64_t cell, bool, bool) {
  auto sizes = input.sizes().vec();
  sizes.back() = hx.size(0) * hx.size(2);
  Tensor cn = at::empty({0}, input.options()), borders = at::empty({0}, input.options()),
         gates = at::empty({0}, input.options());
  if (cx) {
    const int64_t n = cx->size(2);
    if (keeps_gates(static_cast<Cell>(cell), input.scalar_type(), !batch_sizes.empty(), hx.size(2) != n))
      gates = at::empty({hx.size(0), input.size(0) * input.size(1), 4 * n}, input.options());
    const int64_t steps = batch_sizes.empty() ? input.size(0) : static_cast<int64_t>(batch_sizes.size());
    const int64_t by = steps_of_chunk(steps, cx->size(1));
    cn = at::empty(cx->sizes(), cx->options());
    borders = at::empty({cx->size(0), (steps + by - 1) / by, cx->size(1), cx->size(2)},
                        cx->options().dtype(cx->scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  }
  return {at::empty(sizes, input.options()), at::empty(hx.sizes(), hx.options()), cn, borders, gates};
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> rnn_layer_backward_meta(
    const OptTensor&, const OptTensor&, const OptTensor&, const Tensor& input, at::IntArrayRef, const Tensor& hx,
    const OptTensor& cx, at::TensorList weights, const Tensor&, const Tensor&, const Tensor&, int64_t, bool, bool,
    int64_t want) {
  const auto like = [](const Tensor& t) { return at::empty(t.sizes(), t.options()); };
  std::vector<Tensor> dw;
  for (size_t i = 0; i < weights.size(); ++i)
    dw.push_back(want >> (3 + i) & 1 ? like(weights[i]) : at::empty({0}, weights[i].options()));
  return {want & 1 ? like(input) : Tensor(), want & 2 ? like(hx) : Tensor(), want & 4 ? like(*cx) : Tensor(),
          std::move(dw)};
}

}  // namespace

void register_rnn_meta(torch::Library& m) {
  m.impl("_rnn_layer", c10::DispatchKey::Meta, TORCH_FN(rnn_layer_meta));
  m.impl("_rnn_layer_backward", c10::DispatchKey::Meta, TORCH_FN(rnn_layer_backward_meta));
}

}  // namespace tsmem
