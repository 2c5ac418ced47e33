#include "patterns/all.h"

namespace tsmem {

// A recurrent network: its gates are computed again from the inputs and the states, which are there anyway.
Pattern rnn() {
  Pattern p{
      .name = "rnn",
      .algebra = "y, h, c = lstm(x, (h0, c0)), or y, h = gru, rnn_tanh or rnn_relu(x, h0)",
      .keeps = "before: x, y, and 6 to 16 times y in gates and states; after: x, y, and of an LSTM c at a few steps",
      .conditions = "nothing writes to the input, the first states or the output later: PyTorch may not keep them",
      .rules = {}};
  const std::string arguments = "(%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7, %a8)";
  for (const std::string op : {"lstm", "gru", "rnn_tanh", "rnn_relu"}) {
    const std::string results = op == "lstm" ? "%y, %h, %c = " : "%y, %h = ";
    p.rules.push_back({.match = results + op + arguments,
                       .rewrite = results + "tsmem::" + op + arguments,
                       .intact = {"a0", "a1", "a2", "y"}});
  }
  return p;
}

}  // namespace tsmem
