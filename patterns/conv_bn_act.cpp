#include "patterns/all.h"

namespace tsmem {

static std::vector<Rule> rules(bool recompute) {
  std::vector<Rule> rules;
  const std::string bn =
      "%gamma, %beta, %mean, %var, %train, %momentum, %eps, %cudnn, ACT, " + std::string(recompute ? "true" : "false");
  // A frozen convolution does not keep its input.
  const std::set<std::string> intact = recompute ? std::set<std::string>{"x"} : std::set<std::string>{};
  const auto add = [&](const std::string& conv, const std::string& rest) {
    const std::string norm = "%n = batch_norm(%c, %gamma, %beta, %mean, %var, %train, %momentum, %eps, %cudnn)";
    const std::string op = "tsmem::conv_batch_norm_act(" + rest + ", " + bn + ")";
    // A scripted norm asks for the size of its input, the conv output that is no longer made.
    const std::string sizes =
        "%c = tsmem::conv_output_size(%x, %w" + rest.substr(std::string("%x, %w, %b").size()) + ")";
    rules.push_back(
        {.match = conv + "\n" + norm + "\n%z = act(%n)", .rewrite = "%z = " + op, .sizes = sizes, .intact = intact});
    rules.push_back({.match = conv + "\n" + norm, .rewrite = "%n = " + op, .sizes = sizes, .intact = intact});
  };
  const std::pair<const char*, const char*> dims[] = {{"1", "[0]"}, {"2", "[0, 0]"}, {"3", "[0, 0, 0]"}};
  add("%c = _convolution(%x, %w, %b, %stride, %padding, %dilation, %transposed, %outpad, %groups, %benchmark, "
      "%deterministic, %enabled, %tf32)",
      "%x, %w, %b, %stride, %padding, %dilation, %transposed, %outpad, %groups");
  for (const auto& [d, zero] : dims) {
    add("%c = conv" + std::string(d) + "d(%x, %w, %b, %stride, %padding, %dilation, %groups)",
        "%x, %w, %b, %stride, %padding, %dilation, false, " + std::string(zero) + ", %groups");
    add("%c = conv_transpose" + std::string(d) + "d(%x, %w, %b, %stride, %padding, %outpad, %groups, %dilation)",
        "%x, %w, %b, %stride, %padding, %dilation, true, %outpad, %groups");
  }
  return rules;
}

// z = act(batch_norm(conv(x))) as one op.
Pattern conv_bn_act() {
  return {.name = "conv-bn-act",
          .algebra = "z = act(batch_norm(conv(x, w)))",
          .keeps = "before: x, y = conv(x, w), batch_norm(y) or z; after: x (only if w needs grad), y",
          .conditions =
              "y and batch_norm(y) have no other user but for their sizes; used only where the option only names it",
          .by_default = false,
          .rules = rules(false)};
}

// The same, with the convolution recomputed in backward.
Pattern conv_bn_act_recompute() {
  return {.name = "conv-bn-act-recompute",
          .algebra = "z = act(batch_norm(conv(x, w))), the convolution recomputed in backward",
          .keeps = "before: x, y = conv(x, w), batch_norm(y) or z; after: x",
          .conditions =
              "y and batch_norm(y) have no other user but for their sizes; nothing writes to x later; used only where "
              "the option only names it",
          .by_default = false,
          .rules = rules(true)};
}

}  // namespace tsmem
