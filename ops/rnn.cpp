// LSTM, GRU and simple recurrent networks. Backward needs the inputs and outputs of each layer, which are there anyway,
// and, of an LSTM, the cell's state at a few steps; the gates, three or four times as large, are computed again, a
// chunk of steps at a time (ops/cpu/rnn.cpp), but for LSTMs of which oneDNN is too fast for that. Between layers
// our dropout keeps a bit an element.
//
// On the CPU, in float32 and float64; elsewhere, in half precision and under autocast, the networks are PyTorch's own.
#include <ATen/autocast_mode.h>

#include "function.h"
#include "rnn_layer.h"

#include "recompute.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;
using at::TensorList;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LayerArgs {
  Cell cell;
  bool biases, bidirectional;
  std::vector<int64_t> batch_sizes;  // of packed rows; else empty
};

// A layer's results by PyTorch's operators for packed rows: oneDNN's LSTM can't be differentiated twice.
std::vector<Tensor> layer_by_pytorch(const Tensor& input, const Tensor& hx, const Tensor& cx, TensorList weights,
                                     const LayerArgs& args) {
  const bool packed = !args.batch_sizes.empty();
  const auto sizes = packed ? args.batch_sizes : std::vector<int64_t>(input.size(0), input.size(1));
  const Tensor batch_sizes = at::tensor(sizes, at::kLong), rows = packed ? input : input.flatten(0, 1);
  std::vector<Tensor> results;
  const auto run = [&](auto op) {
    auto [out, hn] = op(rows, batch_sizes, hx, weights, args.biases, 1, 0.0, true, args.bidirectional);
    results = {out, hn};
  };
  switch (args.cell) {
    case Cell::lstm: {
      auto [out, hn, cn] = at::lstm(rows, batch_sizes, std::vector<Tensor>{hx, cx}, weights, args.biases, 1, 0.0, true,
                                    args.bidirectional);
      results = {out, hn, cn};
      break;
    }
    case Cell::gru:
      run([](const auto&... a) { return at::gru(a...); });
      break;
    case Cell::tanh:
      run([](const auto&... a) { return at::rnn_tanh(a...); });
      break;
    case Cell::relu:
      run([](const auto&... a) { return at::rnn_relu(a...); });
      break;
  }
  if (!packed) results[0] = results[0].unflatten(0, input.sizes().slice(0, 2));
  return results;
}

struct RnnLayer : Function<RnnLayer> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& hx, const OptTensor& cx,
                               TensorList weights, const LayerArgs& args, Tensor* kept) {
    ctx->set_materialize_grads(false);
    static const RnnLayerOp op("tsmem::_rnn_layer");
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto cell = static_cast<int64_t>(args.cell);
    auto [out, hn, cn, borders, gates] =
        op(input, args.batch_sizes, hx, cx, weights, cell, args.biases, args.bidirectional);
    Keeper keeper;
    keeper.add(input);
    keeper.add(hx);
    keeper.add(value_or_undefined(cx));
    for (const Tensor& w : weights) keeper.add(w);
    *kept = keeper.add_result(out);
    keeper.add(borders, true);
    keeper.add(gates, true);
    keeper.save(ctx);
    auto& data = ctx->saved_data;
    data["cell"] = cell;
    data["biases"] = args.biases;
    data["bidirectional"] = args.bidirectional;
    data["batch_sizes"] = args.batch_sizes;
    data["weights"] = static_cast<int64_t>(weights.size());
    data["hooks"] = hooks_active();
    if (cx) return {out, hn, cn};
    return {out, hn};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    static const RnnLayerBackwardOp op("tsmem::_rnn_layer_backward");
    auto& data = ctx->saved_data;
    const auto weights = static_cast<size_t>(data["weights"].toInt());
    variable_list result(5 + weights);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); })) return result;
    const SavedTensors kept(ctx);
    std::vector<Tensor> w;
    for (size_t i = 0; i < weights; ++i) w.push_back(kept[3 + i]);
    const bool lstm = kept[2].defined();
    int64_t want = 0;
    for (size_t i = 0, edge = 0; i < 3 + weights; ++i)
      if (i != 2 || lstm) want |= static_cast<int64_t>(ctx->needs_input_grad(edge++)) << i;
    const auto cell = data["cell"].toInt();
    if (at::GradMode::is_enabled()) {
      const LayerArgs args{static_cast<Cell>(cell), data["biases"].toBool(), data["bidirectional"].toBool(),
                           data["batch_sizes"].toIntVector()};
      std::vector<Tensor> operands{kept[0], kept[1], kept[2]};
      operands.insert(operands.end(), w.begin(), w.end());
      c10::SmallVector<bool, 16> wanted;
      for (size_t i = 0; i < operands.size(); ++i) wanted.push_back(want >> i & 1);
      const auto g = differentiable_gradients(operands, wanted, grads, [&](const auto& t) {
        return layer_by_pytorch(t[0], t[1], t[2], TensorList(t).slice(3), args);
      });
      std::copy(g.begin(), g.end(), result.begin());
      return result;
    }
    // Whoever has hooks on saved tensors may hold the gates.
    if (last_reader() && !data["hooks"].toBool()) want |= kTakesGates;
    {
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      auto [dx, dh, dc, dw] =
          op(optional(grads[0]), optional(grads[1]), lstm ? optional(grads[2]) : std::nullopt, kept[0],
             data["batch_sizes"].toIntVector(), kept[1], optional(kept[2]), w, kept[3 + weights], kept[4 + weights],
             kept[5 + weights], cell, data["biases"].toBool(), data["bidirectional"].toBool(), want);
      result[0] = std::move(dx);
      result[1] = std::move(dh);
      result[2] = std::move(dc);
      for (size_t i = 0; i < weights; ++i)
        if (want >> (3 + i) & 1) result[3 + i] = std::move(dw[i]);
    }
    return result;
  }
};

// A network as its operator was called.
struct Network {
  Cell cell;
  std::vector<Tensor> hidden;  // hx, and an LSTM's cx
  std::vector<Tensor> params;
  bool biases;
  int64_t layers;
  double dropout;
  bool train, bidirectional;

  int64_t directions() const { return bidirectional ? 2 : 1; }
};

bool sized(const Tensor& t, at::IntArrayRef sizes) { return t.sizes() == sizes; }

// Whether the weights are those of such a network, with as many as the layers want.
bool fits_weights(const Network& n, int64_t inputs) {
  const int64_t d = n.directions(), columns = n.hidden[0].size(2), state = n.hidden.back().size(2);
  const bool projects = n.cell == Cell::lstm && columns != state;
  const int64_t each = weights_of_direction(n.biases, projects), gates = gates_of(n.cell) * state;
  if (static_cast<int64_t>(n.params.size()) != n.layers * d * each) return false;
  for (int64_t l = 0; l < n.layers; ++l)
    for (int64_t k = 0; k < d; ++k) {
      const auto* w = &n.params[(l * d + k) * each];
      bool fits = sized(w[0], {gates, l == 0 ? inputs : d * columns}) && sized(w[1], {gates, columns});
      if (n.biases) fits = fits && sized(w[2], {gates}) && sized(w[3], {gates});
      if (projects) fits = fits && sized(w[each - 1], {columns, state});
      if (!fits) return false;
    }
  return true;
}

// The batch sizes of packed rows, where they are what PyTorch's packing makes: positive, never growing, all rows.
std::optional<std::vector<int64_t>> packed_sizes(const Tensor& batch_sizes, int64_t rows, int64_t batch) {
  if (!batch_sizes.is_cpu() || batch_sizes.scalar_type() != at::kLong || batch_sizes.dim() != 1 ||
      !batch_sizes.is_contiguous() || batch_sizes.numel() == 0 || batch_sizes.key_set().has(c10::DispatchKey::Python))
    return std::nullopt;
  const auto* first = batch_sizes.const_data_ptr<int64_t>();
  std::vector<int64_t> sizes(first, first + batch_sizes.numel());
  int64_t sum = 0, last = batch;
  for (int64_t size : sizes) {
    if (size < 1 || size > last) return std::nullopt;
    sum += last = size;
  }
  if (sum != rows || sizes[0] != batch) return std::nullopt;
  return sizes;
}

bool under_autocast(at::DeviceType device) {
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

// Whether the network runs here.
bool network_is_ours(const Network& n, const Tensor& input, int64_t dim) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tsmem::_rnn_layer", "");
  bool grad = false, alike = true;
  const auto see = [&](const Tensor& t) {
    grad = grad || t.requires_grad();
    alike =
        alike && plain(t) && t.scalar_type() == input.scalar_type() && t.device() == input.device() && t.numel() > 0;
  };
  see(input);
  for (const Tensor& t : n.hidden) see(t);
  for (const Tensor& t : n.params) see(t);
  const bool full = input.scalar_type() == at::kFloat || input.scalar_type() == at::kDouble;
  if (!at::GradMode::is_enabled() || !grad || !alike || !full || !has_kernel(op, input) || input.dim() != dim ||
      under_autocast(input.device().type()))
    return false;
  if (n.layers < 1 || n.hidden.size() != (n.cell == Cell::lstm ? 2 : 1)) return false;
  for (const Tensor& t : n.hidden)
    if (t.dim() != 3 || t.size(0) != n.layers * n.directions() || t.size(1) != n.hidden[0].size(1)) return false;
  return fits_weights(n, input.size(dim - 1));
}

// The network's results: the output, and the last states of all layers.
std::vector<Tensor> run_layers(const Network& n, Tensor x, std::vector<int64_t> batch_sizes) {
  static const auto drop = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("tsmem::dropout", "effect")
                               .typed<Tensor(const Tensor&, double, bool, bool, int64_t)>();
  const LayerArgs args{n.cell, n.biases, n.bidirectional, std::move(batch_sizes)};
  const int64_t d = n.directions(), each = static_cast<int64_t>(n.params.size()) / n.layers;
  std::vector<std::vector<Tensor>> last(n.hidden.size());
  for (int64_t l = 0; l < n.layers; ++l) {
    const auto of_layer = [&](const Tensor& t) { return n.layers == 1 ? t : t.narrow(0, l * d, d); };
    const OptTensor cx = n.cell == Cell::lstm ? OptTensor(of_layer(n.hidden[1])) : std::nullopt;
    Tensor kept;
    const auto result =
        RnnLayer::apply(x, of_layer(n.hidden[0]), cx, TensorList(n.params).slice(l * each, each), args, &kept);
    x = result[0];
    keeps_itself(x, kept);
    for (size_t i = 0; i < last.size(); ++i) last[i].push_back(result[1 + i]);
    if (n.train && n.dropout != 0 && l + 1 < n.layers) x = drop.call(x, n.dropout, true, false, 1);
  }
  std::vector<Tensor> results{x};
  for (const auto& states : last) results.push_back(n.layers == 1 ? states[0] : at::cat(states));
  return results;
}

// The results, or none where PyTorch's own operator has to run.
std::optional<std::vector<Tensor>> run_network(const Network& n, const Tensor& input, bool batch_first) {
  if (!network_is_ours(n, input, 3)) return std::nullopt;
  const Tensor x = batch_first ? input.transpose(0, 1) : input;
  if (x.size(1) != n.hidden[0].size(1)) return std::nullopt;
  auto results = run_layers(n, x, {});
  if (batch_first) results[0] = results[0].transpose(0, 1);
  return results;
}
std::optional<std::vector<Tensor>> run_packed(const Network& n, const Tensor& data, const Tensor& batch_sizes) {
  if (!network_is_ours(n, data, 2)) return std::nullopt;
  auto sizes = packed_sizes(batch_sizes, data.size(0), n.hidden[0].size(1));
  if (!sizes) return std::nullopt;
  return run_layers(n, data, std::move(*sizes));
}

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Two = std::tuple<Tensor, Tensor>;

Three lstm(const Tensor& input, TensorList hx, TensorList params, bool has_biases, int64_t num_layers, double dropout,
           bool train, bool bidirectional, bool batch_first) {
  const Network n{Cell::lstm, hx.vec(), params.vec(), has_biases, num_layers, dropout, train, bidirectional};
  if (const auto r = run_network(n, input, batch_first)) return {(*r)[0], (*r)[1], (*r)[2]};
  return at::lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
}
Three lstm_packed(const Tensor& data, const Tensor& batch_sizes, TensorList hx, TensorList params, bool has_biases,
                  int64_t num_layers, double dropout, bool train, bool bidirectional) {
  const Network n{Cell::lstm, hx.vec(), params.vec(), has_biases, num_layers, dropout, train, bidirectional};
  if (const auto r = run_packed(n, data, batch_sizes)) return {(*r)[0], (*r)[1], (*r)[2]};
  return at::lstm(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional);
}

// PyTorch's operators of networks with one state.
template <Cell cell, class... A>
Two aten_rnn(const A&... arguments) {
  if constexpr (cell == Cell::gru)
    return at::gru(arguments...);
  else if constexpr (cell == Cell::tanh)
    return at::rnn_tanh(arguments...);
  else
    return at::rnn_relu(arguments...);
}

template <Cell cell>
Two one_state(const Tensor& input, const Tensor& hx, TensorList params, bool has_biases, int64_t num_layers,
              double dropout, bool train, bool bidirectional, bool batch_first) {
  const Network n{cell, {hx}, params.vec(), has_biases, num_layers, dropout, train, bidirectional};
  if (const auto r = run_network(n, input, batch_first)) return {(*r)[0], (*r)[1]};
  return aten_rnn<cell>(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
}
template <Cell cell>
Two one_state_packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hx, TensorList params,
                     bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional) {
  const Network n{cell, {hx}, params.vec(), has_biases, num_layers, dropout, train, bidirectional};
  if (const auto r = run_packed(n, data, batch_sizes)) return {(*r)[0], (*r)[1]};
  return aten_rnn<cell>(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional);
}

using Draw = const c10::List<int64_t>&;

// The same with a list that the schema says is written to, as dropout's.
template <auto f>
struct Drawing;
template <class R, class... A, R (*f)(A...)>
struct Drawing<f> {
  static R call(A... arguments, Draw) { return f(std::forward<A>(arguments)...); }
};

template <auto f>
void define(torch::Library& m, const std::string& name, const std::string& arguments, const std::string& results) {
  const bool packed = name.ends_with(".data");
  m.def((name + "(" + arguments + ", int[](a!) draw) -> (" + results + ")").c_str(), TORCH_FN((Drawing<f>::call)));
  const std::string effect = name.substr(0, name.find('.')) + (packed ? ".data_effect" : ".input_effect");
  m.def(torch::schema((effect + "(" + arguments + ") -> (" + results + ")").c_str(),
                      c10::AliasAnalysisKind::CONSERVATIVE),
        TORCH_FN(f));
}

}  // namespace

void register_rnn(torch::Library& m) {
  const std::string rest =
      "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional";
  const std::string input = "Tensor input, ", data = "Tensor data, Tensor batch_sizes, ", first = ", bool batch_first";
  const std::string states = "Tensor[] hx, ", state = "Tensor hx, ", three = "Tensor, Tensor, Tensor",
                    two = "Tensor, Tensor";
  define<&lstm>(m, "lstm.input", input + states + rest + first, three);
  define<&lstm_packed>(m, "lstm.data", data + states + rest, three);
  define<&one_state<Cell::gru>>(m, "gru.input", input + state + rest + first, two);
  define<&one_state_packed<Cell::gru>>(m, "gru.data", data + state + rest, two);
  define<&one_state<Cell::tanh>>(m, "rnn_tanh.input", input + state + rest + first, two);
  define<&one_state_packed<Cell::tanh>>(m, "rnn_tanh.data", data + state + rest, two);
  define<&one_state<Cell::relu>>(m, "rnn_relu.input", input + state + rest + first, two);
  define<&one_state_packed<Cell::relu>>(m, "rnn_relu.data", data + state + rest, two);
  m.def(
      "_rnn_layer(Tensor input, int[] batch_sizes, Tensor hx, Tensor? cx, Tensor[] weights, int cell, bool biases, "
      "bool bidirectional) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_rnn_layer_backward(Tensor? grad_out, Tensor? grad_hn, Tensor? grad_cn, Tensor input, int[] batch_sizes, Tensor "
      "hx, Tensor? cx, Tensor[] weights, Tensor out, Tensor borders, Tensor gates, int cell, bool biases, bool "
      "bidirectional, int want) -> (Tensor, Tensor, Tensor, Tensor[])");
}

}  // namespace tsmem
