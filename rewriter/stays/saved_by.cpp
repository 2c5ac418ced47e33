#include "rewriter/stays/saved_by.h"

#include <algorithm>
#include <sstream>

namespace tsmem {

// `what`: the arguments that are saved, "result", and "internals". "input:weight" is saved where weight needs a
// gradient. Numbers a channel or a row (statistics) count as nothing. PyTorch's: tools/autograd/derivatives.yaml; those
// of what composes others are what these save.
const std::vector<SavedByRow>& saved_by_rows() {
  static const std::vector<SavedByRow> rows = {
      // Products.
      {"aten::_convolution", "input:weight weight:input"},
      {"aten::addbmm", "batch1:batch2 batch2:batch1"},
      {"aten::addmm", "mat1:mat2 mat2:mat1"},
      {"aten::addmv", "mat:vec vec:mat"},
      {"aten::baddbmm", "batch1:batch2 batch2:batch1"},
      {"aten::bilinear", "input1 input2"},
      {"aten::bmm", "self:mat2 mat2:self"},
      {"aten::conv1d", "input:weight weight:input"},
      {"aten::conv2d", "input:weight weight:input"},
      {"aten::conv3d", "input:weight weight:input"},
      {"aten::conv_transpose1d", "input:weight weight:input"},
      {"aten::conv_transpose2d", "input:weight weight:input"},
      {"aten::conv_transpose3d", "input:weight weight:input"},
      {"aten::convolution", "input:weight weight:input"},
      {"aten::dot", "self:tensor tensor:self"},
      {"aten::einsum", "tensors"},
      {"aten::linear", "input:weight weight:input"},
      {"aten::matmul", "self:other other:self"},
      {"aten::mm", "self:mat2 mat2:self"},
      {"aten::mv", "self:vec vec:self"},
      {"aten::scaled_dot_product_attention", "query key value result"},
      // Recurrent layers: gates, cells and hidden states of every step.
      {"aten::gru", "input internals"},
      {"aten::gru_cell", "input internals"},
      {"aten::lstm", "input internals"},
      {"aten::lstm_cell", "input internals"},
      {"aten::rnn_relu", "input internals"},
      {"aten::rnn_relu_cell", "input internals"},
      {"aten::rnn_tanh", "input internals"},
      {"aten::rnn_tanh_cell", "input internals"},
      // Norms.
      {"aten::batch_norm", "input"},
      {"aten::group_norm", "input"},
      {"aten::instance_norm", "input"},
      {"aten::layer_norm", "input"},
      {"aten::native_batch_norm", "input"},
      {"aten::native_group_norm", "input"},
      {"aten::native_layer_norm", "input"},
      {"aten::rms_norm", "input"},
      // Activations.
      {"aten::celu", "self"},
      {"aten::elu", "self"},
      {"aten::gelu", "self"},
      {"aten::glu", "self"},
      {"aten::hardshrink", "self"},
      {"aten::hardsigmoid", "self"},
      {"aten::hardswish", "self"},
      {"aten::hardtanh", "self"},
      {"aten::leaky_relu", "self"},
      {"aten::log_sigmoid", "self"},
      {"aten::log_softmax", "result"},
      {"aten::mish", "self"},
      {"aten::prelu", "self"},
      {"aten::relu", "result"},
      {"aten::relu6", "self"},
      {"aten::rrelu", "self internals"},
      {"aten::selu", "self"},
      {"aten::sigmoid", "result"},
      {"aten::silu", "self"},
      {"aten::softmax", "result"},
      {"aten::softplus", "self"},
      {"aten::softshrink", "self"},
      {"aten::tanh", "result"},
      {"aten::threshold", "self"},
      // Functions of an element.
      {"aten::abs", "self"},
      {"aten::acos", "self"},
      {"aten::atan", "self"},
      {"aten::clamp", "self"},
      {"aten::clamp_max", "self"},
      {"aten::clamp_min", "self"},
      {"aten::cos", "self"},
      {"aten::div", "other self:other"},
      {"aten::erf", "self"},
      {"aten::exp", "result"},
      {"aten::expm1", "result"},
      {"aten::log", "self"},
      {"aten::log10", "self"},
      {"aten::log1p", "self"},
      {"aten::log2", "self"},
      {"aten::masked_fill", "mask"},
      {"aten::maximum", "self other"},
      {"aten::minimum", "self other"},
      {"aten::mul", "self:other other:self"},
      {"aten::pow", "self result:exponent"},
      {"aten::reciprocal", "result"},
      {"aten::rsqrt", "result"},
      {"aten::sin", "self"},
      {"aten::sqrt", "result"},
      {"aten::square", "self"},
      {"aten::where", "condition"},
      // Pools, and what else has a window.
      {"aten::adaptive_avg_pool1d", "self"},
      {"aten::adaptive_avg_pool2d", "self"},
      {"aten::adaptive_avg_pool3d", "self"},
      {"aten::adaptive_max_pool1d", "self internals"},
      {"aten::adaptive_max_pool2d", "self internals"},
      {"aten::adaptive_max_pool3d", "self internals"},
      {"aten::avg_pool1d", "self"},
      {"aten::avg_pool2d", "self"},
      {"aten::avg_pool3d", "self"},
      {"aten::grid_sampler", "input grid"},
      {"aten::max_pool1d", "self internals"},
      {"aten::max_pool2d", "self internals"},
      {"aten::max_pool3d", "self internals"},
      {"aten::reflection_pad1d", "self"},
      {"aten::reflection_pad2d", "self"},
      {"aten::reflection_pad3d", "self"},
      {"aten::replication_pad1d", "self"},
      {"aten::replication_pad2d", "self"},
      {"aten::replication_pad3d", "self"},
      // What picks elements.
      {"aten::embedding", "indices"},
      {"aten::embedding_bag", "internals"},
      {"aten::gather", "index"},
      {"aten::index", "indices"},
      {"aten::index_add", "index"},
      {"aten::index_put", "indices"},
      {"aten::index_select", "index"},
      {"aten::kthvalue", "internals"},
      {"aten::max", "internals"},
      {"aten::median", "internals"},
      {"aten::min", "internals"},
      {"aten::repeat_interleave", "internals"},
      {"aten::scatter", "index"},
      {"aten::scatter_add", "index"},
      {"aten::scatter_reduce", "self index src result"},
      {"aten::sort", "internals"},
      {"aten::topk", "internals"},
      // Sums of some kind.
      {"aten::amax", "self result"},
      {"aten::amin", "self result"},
      {"aten::cdist", "x1 x2 result"},
      {"aten::cosine_similarity", "x1 x2"},
      {"aten::cross_entropy_loss", "target internals"},
      {"aten::cumprod", "self result"},
      {"aten::linalg_vector_norm", "self result"},
      {"aten::logsumexp", "self result"},
      {"aten::norm", "self result"},
      {"aten::prod", "self result"},
      {"aten::std", "self result"},
      {"aten::var", "self"},
      // Losses.
      {"aten::binary_cross_entropy", "self target"},
      {"aten::binary_cross_entropy_with_logits", "self target"},
      {"aten::cross_entropy_loss", "internals"},
      {"aten::huber_loss", "self target"},
      {"aten::kl_div", "target"},
      {"aten::l1_loss", "internals"},
      {"aten::mse_loss", "self target"},
      {"aten::nll_loss", "self target"},
      {"aten::nll_loss_nd", "target"},
      {"aten::smooth_l1_loss", "self target"},
      // Masks of random numbers.
      {"aten::alpha_dropout", "internals"},
      {"aten::dropout", "internals"},
      {"aten::feature_alpha_dropout", "internals"},
      {"aten::feature_dropout", "internals"},
      {"aten::native_dropout", "internals"},
      // Nothing, or sizes alone.
      {"aten::__interpolate", ""},
      {"aten::add", ""},
      {"aten::cat", ""},
      {"aten::clone", ""},
      {"aten::concat", ""},
      {"aten::constant_pad_nd", ""},
      {"aten::copy", ""},
      {"aten::cumsum", ""},
      {"aten::flip", ""},
      {"aten::hstack", ""},
      {"aten::index_fill", "index"},
      {"aten::lerp", ""},
      {"aten::mean", ""},
      {"aten::neg", ""},
      {"aten::pad", ""},
      {"aten::pixel_shuffle", ""},
      {"aten::pixel_unshuffle", ""},
      {"aten::repeat", ""},
      {"aten::roll", ""},
      {"aten::rsub", ""},
      {"aten::stack", ""},
      {"aten::sub", ""},
      {"aten::sum", ""},
      {"aten::tril", ""},
      {"aten::triu", ""},
      {"aten::upsample_bicubic2d", ""},
      {"aten::upsample_bilinear2d", ""},
      {"aten::upsample_linear1d", ""},
      {"aten::upsample_nearest1d", ""},
      {"aten::upsample_nearest2d", ""},
      {"aten::upsample_nearest3d", ""},
      {"aten::upsample_trilinear3d", ""},
      {"aten::vstack", ""},
      {"aten::zeros_like", ""},
      // This library's that keep something else than all that they take (docs/ops.md).
      {"tsmem::add", ""},
      {"tsmem::adaptive_avg_pool1d", ""},
      {"tsmem::adaptive_avg_pool2d", ""},
      {"tsmem::adaptive_avg_pool3d", ""},
      {"tsmem::adaptive_max_pool1d", "internals"},
      {"tsmem::adaptive_max_pool2d", "internals"},
      {"tsmem::adaptive_max_pool3d", "internals"},
      {"tsmem::alpha_dropout", ""},
      {"tsmem::avg_pool1d", ""},
      {"tsmem::avg_pool2d", ""},
      {"tsmem::avg_pool3d", ""},
      {"tsmem::batch_norm_act", "input"},
      {"tsmem::batch_norm_act_max_pool2d", "input internals"},
      {"tsmem::batch_norm_act_stats", "input"},
      {"tsmem::batch_norm_add_act", "input other"},
      {"tsmem::cat", ""},
      {"tsmem::contiguous", ""},
      {"tsmem::conv1d", "input:weight weight:input"},
      {"tsmem::conv2d", "input:weight weight:input"},
      {"tsmem::conv3d", "input:weight weight:input"},
      {"tsmem::conv_transpose1d", "input:weight weight:input"},
      {"tsmem::conv_transpose2d", "input:weight weight:input"},
      {"tsmem::conv_transpose3d", "input:weight weight:input"},
      {"tsmem::_convolution", "input:weight weight:input"},
      {"tsmem::cross_entropy_loss", "self target"},
      {"tsmem::dropout", ""},
      {"tsmem::feature_alpha_dropout", ""},
      {"tsmem::feature_dropout", ""},
      {"tsmem::group_norm", "input"},
      {"tsmem::gru", "input data result internals"},
      {"tsmem::instance_norm_act", "input"},
      {"tsmem::keep", ""},
      {"tsmem::layer_norm", "input"},
      {"tsmem::linear", "input:weight weight:input"},
      {"tsmem::linear_cross_entropy", "internals"},
      {"tsmem::lstm", "input data result internals"},
      {"tsmem::matmul", "self:other other:self"},
      {"tsmem::max_pool1d", "internals"},
      {"tsmem::max_pool2d", "internals"},
      {"tsmem::max_pool3d", "internals"},
      {"tsmem::mul", "self:other other:self"},
      {"tsmem::pad", ""},
      {"tsmem::reflection_pad1d", ""},
      {"tsmem::reflection_pad2d", ""},
      {"tsmem::reflection_pad3d", ""},
      {"tsmem::replication_pad1d", ""},
      {"tsmem::replication_pad2d", ""},
      {"tsmem::replication_pad3d", ""},
      {"tsmem::reshape", ""},
      {"tsmem::rnn_relu", "input data result internals"},
      {"tsmem::rnn_tanh", "input data result internals"},
      {"tsmem::roll", ""},
      {"tsmem::scaled_dot_product_attention", "query key value result"},
      {"tsmem::softmax", "result"},
  };
  return rows;
}

static SavedBy parsed(std::string_view what) {
  SavedBy saved;
  std::istringstream words{std::string(what)};
  for (std::string word; words >> word;) {
    const size_t colon = word.find(':');
    if (word == "internals")
      saved.internals = true;
    else
      saved.parts.push_back({word.substr(0, colon), colon == word.npos ? "" : word.substr(colon + 1)});
  }
  return saved;
}

// relu_ -> relu; __and__ stays.
static std::string_view without_underscore(std::string_view op) {
  return op.size() > 1 && op.back() == '_' && op[op.size() - 2] != '_' ? op.substr(0, op.size() - 1) : op;
}

std::optional<SavedBy> saved_by(std::string_view op) {
  const std::string_view name = without_underscore(op);
  for (const SavedByRow& row : saved_by_rows())
    if (row.op == name) return parsed(row.what);
  if (!name.starts_with("tsmem::")) return std::nullopt;
  SavedBy all;
  all.all_arguments = true;
  return all;
}

bool never_needs_gradient(std::string_view op) {
  static constexpr std::string_view names[] = {
      "aten::argmax",      "aten::argmin",     "aten::argsort",   "aten::bernoulli",  "aten::bitwise_and",
      "aten::bitwise_not", "aten::bool",       "aten::bucketize", "aten::ceil",       "aten::detach",
      "aten::eq",          "aten::floor",      "aten::ge",        "aten::gt",         "aten::isfinite",
      "aten::isinf",       "aten::isnan",      "aten::le",        "aten::long",       "aten::logical_and",
      "aten::logical_not", "aten::logical_or", "aten::lt",        "aten::ne",         "aten::nonzero",
      "aten::one_hot",     "aten::ones_like",  "aten::rand_like", "aten::randn_like", "aten::round",
      "aten::sign",        "aten::zeros_like"};
  return std::find(std::begin(names), std::end(names), without_underscore(op)) != std::end(names);
}

}  // namespace tsmem
