#include "cpu/factor.h"

#include <ATen/Parallel.h>

#include "cpu/product.h"
#include "cpu_dtype.h"

namespace tsmem {
namespace {

using at::Tensor;

constexpr int64_t kTimes = 4;                          // products that are worth the panels
constexpr int64_t kSerialProducts = int64_t{1} << 17;  // multiplications that are not worth a second thread

int64_t panels_in(Dtype dtype, int64_t columns) {
  const int64_t each = product_kernels().panel_columns(dtype);
  return (columns + each - 1) / each;
}

// f(first, last) for panels, each of which takes `work` multiplications.
template <class F>
void over_panels(int64_t panels, int64_t work, const F& f) {
  at::parallel_for(0, panels, std::max<int64_t>(1, kSerialProducts / std::max<int64_t>(1, work)), f);
}

}  // namespace

Factor factor_of(const Tensor& matrix, int64_t times) {
  const bool full = matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kDouble;
  if (!full || times < kTimes) return {matrix, {}};
  const Dtype dtype = cpu_dtype(matrix.scalar_type());
  const int64_t depth = matrix.size(0), columns = matrix.size(1), each = product_kernels().panel_columns(dtype),
                count = panels_in(dtype, columns);
  const Tensor panels = at::empty({count, depth, each}, matrix.options());
  over_panels(count, depth * each, [&](int64_t first, int64_t last) {
    product_kernels().pack(dtype, matrix.const_data_ptr(), matrix.stride(0), matrix.stride(1), depth, columns,
                           panels.mutable_data_ptr(), first, last);
  });
  return {matrix, panels};
}

void multiply(const Tensor& out, const Tensor& start, const Tensor& a, const Factor& factor) {
  Tensor to = out;
  if (!factor.panels.defined()) {
    if (start.defined())
      at::addmm_out(to, start, a, factor.matrix);
    else
      at::mm_out(to, a, factor.matrix);
    return;
  }
  for (const Tensor* t : {&a, &out, &start})
    TORCH_INTERNAL_ASSERT(!t->defined() || t->size(-1) < 2 || t->stride(-1) == 1, "rows must be dense");
  const Rows2d from =
      start.defined() ? Rows2d{start.const_data_ptr(), start.dim() == 2 ? start.stride(0) : 0} : Rows2d{nullptr, 0};
  const ProductArgs product{cpu_dtype(a.scalar_type()),
                            a.size(0),
                            a.size(1),
                            out.size(1),
                            {a.const_data_ptr(), a.stride(0)},
                            factor.panels.const_data_ptr(),
                            from,
                            {to.mutable_data_ptr(), out.stride(0)}};
  over_panels(factor.panels.size(0), product.rows * product.depth * factor.panels.size(2),
              [&](int64_t first, int64_t last) { product_kernels().multiply(product, first, last); });
}

}  // namespace tsmem
