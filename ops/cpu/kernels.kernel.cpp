#include "cpu/kernels.h"

namespace tsmem::TSMEM_ISA {

extern const MaskKernels mask_kernels_table;
extern const NormKernels norm_kernels_table;
extern const NormPoolKernels norm_pool_kernels_table;
extern const PoolKernels pool_kernels_table;
extern const PreluKernels prelu_kernels_table;
extern const ProductKernels product_kernels_table;
extern const RnnKernels rnn_kernels_table;
extern const SmoothActKernels smooth_act_kernels_table;

extern const Kernels all_kernels;
const Kernels all_kernels = {&mask_kernels_table, &norm_kernels_table,      &norm_pool_kernels_table,
                             &pool_kernels_table, &prelu_kernels_table,     &product_kernels_table,
                             &rnn_kernels_table,  &smooth_act_kernels_table};

}  // namespace tsmem::TSMEM_ISA
