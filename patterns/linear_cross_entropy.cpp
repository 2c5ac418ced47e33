#include "patterns/all.h"

namespace tsmem {

// l = cross_entropy(linear(x), t), with what models do to the logits in between: a shift by one word (a slice), and a
// view as rows.
Pattern linear_cross_entropy() {
  Pattern p{.name = "linear-cross-entropy",
            .algebra = "l = cross_entropy(linear(x, weight, bias), t)",
            .keeps =
                "before: x, weight, the logits and their log_softmax; after: the gradients of x, weight and bias, "
                "where they are smaller than the logits",
            .conditions =
                "the logits have no other user but for their sizes; nothing writes to x later; the loss is a mean or a "
                "sum over classes (else both run by themselves)",
            .for_regions = true,
            .differentiable_once = true,
            .rules = {}};
  struct Step {
    std::string line, from, arguments;  // the logits' name after it, and what the op is told of it
  };
  // x[:, :-1], x[:, :-1, :] and x[..., :-1, :], each as TorchScript, a trace and torch.export write it.
  const std::string slice_it = "%sd, %ss, %se, %st", end = "9223372036854775807";
  const std::string all_first[] = {"", "%r = slice(%l, 0, None, None, 1)\n", "%r = slice(%l, 0, 0, " + end + ", 1)\n"};
  const std::string all_last[] = {"", "%q = slice(%s, 2, None, None, 1)\n", "%q = slice(%s, -1, None, None, 1)\n",
                                  "%q = slice(%s, 2, 0, " + end + ", 1)\n"};
  std::vector<Step> slices = {{"", "%l", "0, None, None, 1"}};
  for (const std::string& first : all_first)
    for (const std::string& last : all_last)
      slices.push_back({first + "%s = slice(" + (first.empty() ? "%l" : "%r") + ", " + slice_it + ")\n" + last,
                        last.empty() ? "%s" : "%q", slice_it});
  const auto add = [&](const Step& slice, bool contiguous, bool cast) {
    const std::string between = contiguous ? "%c = contiguous(" + slice.from + ", %cf)\n" : "";
    const std::string from = contiguous ? "%c" : slice.from;
    const Step arrangements[] = {
        {"", from, "\"\", None, 0, 0"},
        {"%v = view(" + from + ", %vs)\n", "%v", contiguous ? "\"reshape\", %vs, 0, 0" : "\"view\", %vs, 0, 0"},
        {"%v = reshape(" + from + ", %vs)\n", "%v", "\"reshape\", %vs, 0, 0"},
        {"%v = flatten(" + from + ", %v0, %v1)\n", "%v", "\"flatten\", None, %v0, %v1"},
        {"%v = transpose(" + from + ", %v0, %v1)\n", "%v", "\"transpose\", None, %v0, %v1"},
        {"%v = permute(" + from + ", [0, 2, 1])\n", "%v", "\"transpose\", None, 1, 2"},
    };
    const std::string linear = " = linear(%x, %w, %b)\n";
    const std::string logits = cast ? "%h" + linear + "%l = to(%h, 6, %n0, %n1, %n2)\n" : "%l" + linear;
    for (const Step& arranged : arrangements)
      p.rules.push_back(
          {.match = logits + slice.line + between + arranged.line + "%z = cross_entropy_loss(" + arranged.from +
                    ", %t, %cw, %reduction, %ignore, %smoothing)",
           .rewrite = "%z = tsmem::linear_cross_entropy(%x, %w, %b, %t, %cw, %reduction, %ignore, %smoothing, " +
                      slice.arguments + ", " + arranged.arguments + (cast ? ", 6)" : ")"),
           .sizes = "%l = tsmem::linear_output_size(%x, %w)",
           .intact = {"x"}});
  };
  for (const Step& slice : slices)
    for (const bool contiguous : {false, true})
      for (const bool cast : {false, true}) add(slice, contiguous, cast);
  return p;
}

}  // namespace tsmem
