// Smaller versions of a model's inputs, to compare more of it in the same time.
#pragma once
#include <ATen/core/ivalue.h>

#include <vector>

namespace tsmem {

// Versions of the arguments that a model may take as well, the smallest first; none where they are small already.
// Tensors that have as many rows (first dimension) as the first tensor has get three, and pictures (the last two
// dimensions of tensors with four or more) get 64 to 95 or 128 to 159 pixels a side, with the same remainder by 32.
// Lists of as many tensors or dictionaries as the first such list has (a detector's pictures and their boxes) get three;
// what is in them stays as it is. The values are those of the first rows and of the upper left corner.
std::vector<std::vector<c10::IValue>> smaller_inputs(const std::vector<c10::IValue>& inputs);

// At most `rows` rows, and pictures of `side` to side + 31 pixels a side where side is not 0.
std::vector<c10::IValue> smaller_inputs(const std::vector<c10::IValue>& inputs, int64_t rows, int64_t side);

}  // namespace tsmem
