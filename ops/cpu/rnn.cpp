// A layer of a recurrent network on the CPU. Forward keeps the output and, of an LSTM, the cell's state at the borders
// of chunks of steps. Backward goes through the chunks from the last to the first: all hidden states are there, so one
// product of matrices makes the gates of all steps of a chunk again, and only what is elementwise runs step by step.
// Gradients of weights are one product a chunk.
//
// Formulas: Hochreiter and Schmidhuber, 1997 (LSTM), Cho et al., 2014 (GRU), in the form of ATen/native/RNN.cpp.
#include "rnn_layer.h"

#include <ATen/Parallel.h>

#include "cpu/factor.h"
#include "cpu/rnn.h"
#include "cpu_dtype.h"
#include "registration.h"

namespace tsmem {
namespace {

using at::Tensor;

constexpr int64_t kSerialState = 1 << 12;  // elements of a state that are not worth a second thread

// f(begin, end) for rows of n elements.
template <class F>
void over_rows(int64_t rows, int64_t n, const F& f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kSerialState / n), f);
}

char* at_row(const Tensor& t, int64_t row) {
  return static_cast<char*>(t.mutable_data_ptr()) + row * t.stride(0) * t.element_size();
}
Rows2d rows_from(const Tensor& t, int64_t row) {
  return {static_cast<const char*>(t.const_data_ptr()) + row * t.stride(0) * t.element_size(), t.stride(0)};
}
MutableRows2d mutable_rows_from(const Tensor& t, int64_t row) {
  return t.defined() ? MutableRows2d{at_row(t, row), t.stride(0)} : MutableRows2d{nullptr, 0};
}

Tensor head(const Tensor& t, int64_t rows) { return t.narrow(0, 0, rows); }

// The steps of a sequence, or of packed ones: rows [begin[t], begin[t + 1]) of the data are those of step t.
struct Steps {
  std::vector<int64_t> begin{0};
  bool same = true;  // all have as many rows

  int64_t count() const { return static_cast<int64_t>(begin.size()) - 1; }
  int64_t size(int64_t t) const { return begin[t + 1] - begin[t]; }
};

Steps steps_of(const Tensor& input, at::IntArrayRef batch_sizes) {
  Steps steps;
  const int64_t count = batch_sizes.empty() ? input.size(0) : static_cast<int64_t>(batch_sizes.size());
  for (int64_t t = 0; t < count; ++t) {
    const int64_t size = batch_sizes.empty() ? input.size(1) : batch_sizes[t];
    steps.begin.push_back(steps.begin.back() + size);
    steps.same = steps.same && size == steps.size(0);
  }
  return steps;
}

// Steps [first, last) in the order in which a direction goes through them; in the data they are rows [low, low + rows).
struct Chunk {
  int64_t first, last, low, rows;
};

// One direction of a layer.
struct Direction {
  Cell cell;
  RnnWeights w;
  const Steps& steps;
  bool reverse;
  Tensor hx, cx;  // [B, Hy], [B, H]
  Tensor out;     // rows of the output's columns that are this direction's
  Tensor bias;    // what the input's part has

  int64_t n() const { return w.hh.size(0) / gates_of(cell); }
  int64_t at(int64_t k) const { return reverse ? steps.count() - 1 - k : k; }

  std::vector<Chunk> chunks() const {
    std::vector<Chunk> all;
    const int64_t count = steps.count(), by = steps_of_chunk(count, steps.size(0));
    for (int64_t first = 0; first < count; first += by) {
      const int64_t last = std::min(count, first + by), low = reverse ? count - last : first;
      all.push_back({first, last, steps.begin[low], steps.begin[low + last - first] - steps.begin[low]});
    }
    return all;
  }

  // The state before step k, for the rows of step k: as they lie, or put together.
  Tensor before(int64_t k) const {
    const int64_t rows = steps.size(at(k));
    if (k == 0) return head(hx, rows);
    const int64_t t = at(k - 1), known = std::min(rows, steps.size(t));
    const Tensor last = out.narrow(0, steps.begin[t], known);
    return known == rows ? last : at::cat({last, hx.narrow(0, known, rows - known)});
  }
  // The same for all steps of a chunk.
  Tensor before(const Chunk& c) const {
    if (steps.same && c.first > 0) return out.narrow(0, c.low + (reverse ? 1 : -1) * steps.size(0), c.rows);
    Tensor all = at::empty({c.rows, hx.size(1)}, hx.options());
    for (int64_t k = c.first; k < c.last; ++k)
      all.narrow(0, steps.begin[at(k)] - c.low, steps.size(at(k))).copy_(before(k));
    return all;
  }

  // The input's part of the pre-activations, in a buffer's first rows.
  Tensor input_part(const Tensor& buffer, const Tensor& x) const {
    Tensor g = head(buffer, x.size(0));
    return bias.defined() ? at::addmm_out(g, bias, x, w.ih.t()) : at::mm_out(g, x, w.ih.t());
  }
  // A GRU's other part.
  void hidden_part(const Tensor& buffer, const Tensor& h, const Factor& hh) const {
    multiply(head(buffer, h.size(0)), w.b_hh, h, hh);
  }
};

RnnWeights weights_of(at::TensorList all, int64_t direction, bool biases, int64_t directions) {
  const auto each = static_cast<int64_t>(all.size()) / directions;
  const auto own = all.slice(direction * each, each);
  RnnWeights w{own[0], own[1], {}, {}, {}};
  if (biases) {
    w.b_ih = own[2];
    w.b_hh = own[3].contiguous();
  }
  if (each == weights_of_direction(biases, true)) w.hr = own[each - 1];
  return w;
}

at::ScalarType state_type(at::ScalarType t) { return t == at::kDouble ? at::kDouble : at::kFloat; }

bool keeps_gates(const Direction& d, bool packed) {
  return tsmem::keeps_gates(d.cell, d.w.hh.scalar_type(), packed, d.w.hr.defined());
}

// The layer's directions, over the columns of `out`.
std::vector<Direction> directions_of(Cell cell, const Steps& steps, const Tensor& hx, const OptTensor& cx,
                                     at::TensorList weights, bool biases, bool bidirectional, const Tensor& out) {
  std::vector<Direction> all;
  const int64_t count = bidirectional ? 2 : 1, columns = hx.size(2);
  const Tensor rows = out.view({-1, out.size(-1)});
  for (int64_t d = 0; d < count; ++d) {
    Direction one{cell, weights_of(weights, d, biases, count), steps, d == 1, hx[d].contiguous(), {}, {}, {}};
    if (cx) one.cx = (*cx)[d];
    one.out = rows.narrow(1, d * columns, columns);
    if (biases) one.bias = cell == Cell::gru ? one.w.b_ih : one.w.b_ih + one.w.b_hh;
    all.push_back(std::move(one));
  }
  return all;
}

// Rows [low, low + rows) of a tensor that is laid out as the input is; each row's elements lie side by side.
Tensor rows_of(const Tensor& t, bool packed, const Chunk& c, int64_t batch) {
  const Tensor rows =
      packed ? t.narrow(0, c.low, c.rows) : t.narrow(0, c.low / batch, c.rows / batch).reshape({c.rows, t.size(2)});
  return rows.stride(1) == 1 ? rows : rows.contiguous();
}

// The last state of each sequence.
void last_states(const Direction& d, const Tensor& hn) {
  if (d.reverse || d.steps.same) {
    hn.copy_(d.out.narrow(0, d.steps.begin[d.reverse ? 0 : d.steps.count() - 1], hn.size(0)));
    return;
  }
  for (int64_t t = 0; t < d.steps.count(); ++t) {
    const int64_t go_on = t + 1 < d.steps.count() ? d.steps.size(t + 1) : 0, end = d.steps.size(t) - go_on;
    if (end > 0) hn.narrow(0, go_on, end).copy_(d.out.narrow(0, d.steps.begin[t] + go_on, end));
  }
}

int64_t most_rows(const std::vector<Chunk>& chunks) {
  int64_t most = 0;
  for (const Chunk& c : chunks) most = std::max(most, c.rows);
  return most;
}

// Runs one direction; c [B, H] is an LSTM's state and ends as the last one, `borders` [chunks, B, H] takes it where a
// chunk begins. `gates` [N, 4 H] takes them, or is undefined.
void run_forward(const Direction& d, const Tensor& input, bool packed, const Tensor& c, const Tensor& borders,
                 const Tensor& gates) {
  const int64_t n = d.n(), batch = d.steps.size(0);
  const Dtype dtype = cpu_dtype(input.scalar_type());
  const auto chunks = d.chunks();
  const bool keep = gates.defined();
  const Tensor buffer = keep ? gates : at::empty({most_rows(chunks), d.w.hh.size(0)}, input.options());
  const Tensor was = keep ? at::empty_like(c) : Tensor();  // of no use: gates become activations along with it
  const Factor hh = factor_of(d.w.hh.t(), d.steps.count());
  Tensor other;
  if (d.cell == Cell::gru) other = at::empty({batch, d.w.hh.size(0)}, input.options());
  if (d.w.hr.defined()) other = at::empty({batch, n}, input.options());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    const Tensor all =
        d.input_part(keep ? gates.narrow(0, chunk.low, chunk.rows) : buffer, rows_of(input, packed, chunk, batch));
    if (d.cell == Cell::lstm) borders[static_cast<int64_t>(i)].copy_(c);
    for (int64_t k = chunk.first; k < chunk.last; ++k) {
      const int64_t t = d.at(k), rows = d.steps.size(t);
      Tensor g = all.narrow(0, d.steps.begin[t] - chunk.low, rows);
      const Tensor h = d.before(k);
      Tensor to = d.out.narrow(0, d.steps.begin[t], rows);
      if (d.cell == Cell::gru)
        d.hidden_part(other, h, hh);
      else
        multiply(g, g, h, hh);
      over_rows(rows, n, [&](int64_t begin, int64_t end) {
        const MutableRows2d state = mutable_rows_from(d.w.hr.defined() ? other : to, begin);
        if (d.cell == Cell::lstm)
          rnn_kernels().lstm_forward(dtype, at_row(g, begin), at_row(c, begin), keep ? at_row(was, begin) : nullptr,
                                     state, end - begin, n);
        else if (d.cell == Cell::gru)
          rnn_kernels().gru_forward(dtype, at_row(g, begin), at_row(other, begin), rows_from(h, begin), state,
                                    end - begin, n);
        else
          rnn_kernels().rnn_forward(dtype, d.cell == Cell::relu, at_row(g, begin), state, end - begin, n);
      });
      if (d.w.hr.defined()) at::mm_out(to, head(other, rows), d.w.hr.t());
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_cpu(const Tensor& input, at::IntArrayRef batch_sizes,
                                                               const Tensor& hx, const OptTensor& cx,
                                                               at::TensorList weights, int64_t cell, bool biases,
                                                               bool bidirectional) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Steps steps = steps_of(input, batch_sizes);
  auto sizes = input.sizes().vec();
  sizes.back() = hx.size(0) * hx.size(2);
  const Tensor out = at::empty(sizes, input.options()), hn = at::empty(hx.sizes(), hx.options());
  const auto directions = directions_of(static_cast<Cell>(cell), steps, hx, cx, weights, biases, bidirectional, out);
  Tensor cn = at::empty({0}, input.options()), borders = at::empty({0}, input.options()),
         gates = at::empty({0}, input.options());
  const bool keep = keeps_gates(directions[0], !batch_sizes.empty());
  if (keep) gates = at::empty({hx.size(0), steps.begin.back(), directions[0].w.hh.size(0)}, input.options());
  if (cx) {
    const auto options = cx->options().dtype(state_type(cx->scalar_type()));
    const auto chunks = static_cast<int64_t>(directions[0].chunks().size());
    cn = cx->to(options.dtype(), false, true, at::MemoryFormat::Contiguous);
    borders = at::empty({cx->size(0), chunks, cx->size(1), cx->size(2)}, options);
  }
  for (size_t i = 0; i < directions.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    run_forward(directions[i], input, !batch_sizes.empty(), cx ? cn[at] : Tensor(), cx ? borders[at] : Tensor(),
                keep ? gates[at] : Tensor());
    last_states(directions[i], hn[at]);
  }
  return {out, hn, cn.to(input.scalar_type()), borders, gates};
}

// A gradient of a weight, summed up over chunks, in the type that is computed in. Products are summed up transposed:
// BLAS takes up to half as long again for those with an odd number of columns, which the gates together rarely have.
struct Sum {
  bool wanted = false;
  Tensor value;

  // a^T b
  void add_product(const Tensor& a, const Tensor& b) {
    if (!wanted) return;
    if (!value.defined())
      value = b.t().mm(a).to(state_type(a.scalar_type()));
    else if (value.scalar_type() == a.scalar_type())
      value.addmm_(b.t(), a);
    else
      value.add_(b.t().mm(a));
  }
  void add_rows(const Tensor& a) {
    if (!wanted) return;
    const Tensor sum = a.sum(0, false, state_type(a.scalar_type()));
    value = value.defined() ? value.add_(sum) : sum;
  }
  Tensor result(const Tensor& like) {
    return wanted ? std::exchange(value, {}).t().to(like.scalar_type()).contiguous() : at::empty({0}, like.options());
  }
};

struct Sums {
  Sum ih, hh, b_ih, b_hh, hr;
};

// What backward through one direction starts from, and writes to.
struct Gradients {
  Tensor out;        // rows as the output's, or undefined
  int64_t column;    // of `out`, where this direction's begin
  Tensor h, c;       // [B, Hy], [B, H]: of the last states, then of the first
  Tensor input;      // [N, D], or undefined: not wanted
  bool add_input;    // to what `input` has
  bool takes_gates;  // see kTakesGates
  bool packed;
};

void run_backward(const Direction& d, const Tensor& input, const Tensor& borders, const Tensor& gates,
                  const Gradients& grad, Sums& sums) {
  const int64_t n = d.n(), batch = d.steps.size(0), width = d.w.hh.size(0), columns = d.hx.size(1);
  const Dtype dtype = cpu_dtype(input.scalar_type());
  const bool lstm = d.cell == Cell::lstm, gru = d.cell == Cell::gru, projects = d.w.hr.defined();
  const auto chunks = d.chunks();
  const int64_t most = most_rows(chunks);
  const Factor hh = factor_of(d.w.hh, d.steps.count());
  const auto options = input.options();
  const bool in_place = gates.defined() && grad.takes_gates;
  const Tensor buffer = at::empty({in_place ? 0 : most, width}, options),
               zeros = at::zeros({std::max(n, columns)}, options);
  const Tensor other = gru ? at::empty({most, width}, options) : Tensor();
  const Tensor c_before = lstm ? at::empty({most, n}, borders.options()) : Tensor();
  const Tensor c = lstm ? at::empty({batch, n}, borders.options()) : Tensor();
  // Of projected states: before the projection, and their gradient.
  const Tensor raw = projects ? at::empty({most, n}, options) : Tensor();
  const Tensor projected_grad = projects ? at::empty({most, columns}, options) : Tensor();
  const Tensor raw_grad = projects ? at::empty({batch, n}, options) : Tensor();

  for (size_t i = chunks.size(); i-- > 0;) {
    const Chunk& chunk = chunks[i];
    const Tensor x = rows_of(input, grad.packed, chunk, batch), h = d.before(chunk);
    const auto place = [&](int64_t t) { return d.steps.begin[t] - chunk.low; };
    // The gates of all steps.
    Tensor g = in_place ? gates.narrow(0, chunk.low, chunk.rows) : head(buffer, chunk.rows),
           gh = gru ? head(other, chunk.rows) : Tensor();
    if (gates.defined() && !in_place)
      g.copy_(gates.narrow(0, chunk.low, chunk.rows));
    else if (!gates.defined() && (lstm || gru))
      d.input_part(buffer, x);
    if (gru) {
      d.hidden_part(other, h, {d.w.hh.t(), {}});
      over_rows(chunk.rows, n, [&](int64_t begin, int64_t end) {
        rnn_kernels().gru_forward(dtype, at_row(g, begin), at_row(gh, begin), {nullptr, 0}, {nullptr, 0}, end - begin,
                                  n);
      });
    }
    if (lstm) {
      if (!gates.defined()) g.addmm_(h, d.w.hh.t());
      c.copy_(borders[static_cast<int64_t>(i)]);
      for (int64_t k = chunk.first; k < chunk.last; ++k) {
        const int64_t first = place(d.at(k));
        over_rows(d.steps.size(d.at(k)), n, [&](int64_t begin, int64_t end) {
          void *of = at_row(g, first + begin), *state = at_row(c, begin), *was = at_row(c_before, first + begin);
          if (gates.defined())
            rnn_kernels().lstm_cell(dtype, of, state, was, end - begin, n);
          else
            rnn_kernels().lstm_forward(dtype, of, state, was, mutable_rows_from(raw, first + begin), end - begin, n);
        });
      }
    }
    const Tensor out_grad =
        grad.out.defined() ? rows_of(grad.out, grad.packed, chunk, batch).narrow(1, grad.column, columns) : Tensor();
    const Rows2d nothing{zeros.const_data_ptr(), 0};
    for (int64_t k = chunk.last; k-- > chunk.first;) {
      const int64_t first = place(d.at(k)), rows = d.steps.size(d.at(k));
      Tensor dh = head(grad.h, rows), step = g.narrow(0, first, rows);
      if (projects) {
        Tensor sum = projected_grad.narrow(0, first, rows), to = head(raw_grad, rows);
        if (out_grad.defined())
          at::add_out(sum, dh, out_grad.narrow(0, first, rows));
        else
          sum.copy_(dh);
        at::mm_out(to, sum, d.w.hr);
      }
      over_rows(rows, n, [&](int64_t begin, int64_t end) {
        const Rows2d above = projects             ? rows_from(raw_grad, begin)
                             : out_grad.defined() ? rows_from(out_grad, first + begin)
                                                  : nothing;
        const Rows2d later = projects ? nothing : rows_from(dh, begin);
        if (lstm)
          rnn_kernels().lstm_backward(dtype, at_row(step, begin), at_row(c_before, first + begin), above, later,
                                      at_row(grad.c, begin), end - begin, n);
        else if (gru)
          rnn_kernels().gru_backward(dtype, at_row(step, begin), at_row(gh, first + begin), rows_from(h, first + begin),
                                     above, at_row(dh, begin), end - begin, n);
        else
          rnn_kernels().rnn_backward(dtype, d.cell == Cell::relu, rows_from(d.out, chunk.low + first + begin), above,
                                     later, at_row(step, begin), end - begin, n);
      });
      if (gru)
        multiply(dh, dh, gh.narrow(0, first, rows), hh);
      else
        multiply(dh, {}, step, hh);
    }
    const Tensor& of_hidden = gru ? gh : g;
    sums.ih.add_product(g, x);
    sums.hh.add_product(of_hidden, h);
    sums.b_ih.add_rows(g);
    sums.b_hh.add_rows(of_hidden);
    if (projects) sums.hr.add_product(head(projected_grad, chunk.rows), head(raw, chunk.rows));
    if (grad.input.defined()) {
      Tensor to = grad.input.narrow(0, chunk.low, chunk.rows);
      if (grad.add_input)
        to.addmm_(g, d.w.ih);
      else
        at::mm_out(to, g, d.w.ih);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> backward_cpu(
    const OptTensor& grad_out, const OptTensor& grad_hn, const OptTensor& grad_cn, const Tensor& input,
    at::IntArrayRef batch_sizes, const Tensor& hx, const OptTensor& cx, at::TensorList weights, const Tensor& out,
    const Tensor& borders, const Tensor& gates, int64_t cell, bool biases, bool bidirectional, int64_t want) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Steps steps = steps_of(input, batch_sizes);
  const auto directions = directions_of(static_cast<Cell>(cell), steps, hx, cx, weights, biases, bidirectional, out);
  const Tensor dx = want & 1 ? at::empty(input.sizes(), input.options()) : Tensor();
  const Tensor dh = grad_hn ? grad_hn->clone(at::MemoryFormat::Contiguous) : at::zeros(hx.sizes(), hx.options());
  Tensor dc;
  if (cx) {
    const auto options = borders.options();
    dc = grad_cn ? grad_cn->to(options.dtype(), false, true, at::MemoryFormat::Contiguous)
                 : at::zeros(cx->sizes(), options);
  }
  std::vector<Tensor> dw;
  int64_t bit = 3;
  for (size_t i = 0; i < directions.size(); ++i) {
    const Direction& d = directions[i];
    const auto at = static_cast<int64_t>(i);
    Sums sums;
    std::vector<std::pair<Sum*, Tensor>> all{{&sums.ih, d.w.ih}, {&sums.hh, d.w.hh}};
    if (biases) all.insert(all.end(), {{&sums.b_ih, d.w.b_ih}, {&sums.b_hh, d.w.b_hh}});
    if (d.w.hr.defined()) all.emplace_back(&sums.hr, d.w.hr);
    for (auto& [sum, w] : all) sum->wanted = want >> bit++ & 1;
    const Gradients grad{grad_out ? *grad_out : Tensor(),
                         at * hx.size(2),
                         dh[at],
                         cx ? dc[at] : Tensor(),
                         dx.defined() ? dx.view({-1, dx.size(-1)}) : Tensor(),
                         i > 0,
                         (want & kTakesGates) != 0,
                         !batch_sizes.empty()};
    run_backward(d, input, cx ? borders[at] : Tensor(), gates.numel() > 0 ? gates[at] : Tensor(), grad, sums);
    for (const auto& [sum, w] : all) dw.push_back(sum->result(w));
  }
  return {dx, want & 2 ? dh : Tensor(), want & 4 ? dc.to(input.scalar_type()) : Tensor(), std::move(dw)};
}

}  // namespace

void register_rnn_cpu(torch::Library& m) {
  m.impl("_rnn_layer", c10::DispatchKey::CPU, TORCH_FN(forward_cpu));
  m.impl("_rnn_layer_backward", c10::DispatchKey::CPU, TORCH_FN(backward_cpu));
}

}  // namespace tsmem
