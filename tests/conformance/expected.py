"""What is not as PyTorch's, and why: the one list of what the comparison lets pass.

A regular expression for the sentences that a comparison gives, and the reason. An entry that nothing needs any more fails.
"""
import torch

MODULES = {
    r"^nn\.GaussianNLLLoss .* can't be scripted": "TorchScript can't compile it: its forward has a comprehension with a condition",
    r"^nn\.ConstantPad[123]d .* can't be scripted": "TorchScript can't compile it with the samples' value, an int where F.pad wants a float",
}
if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # since torch 2.15
    MODULES[r"^nn\.LinearCrossEntropyLoss .* can't be scripted"] = "TorchScript can't compile it: the source of its options' class can't be had"

OPERATORS = {
    r"float64 .*: 0 seconds in place of 1$": "the first derivative is piecewise constant: PyTorch's second derivative is a tensor of zeros, ours is not there",
    r"^nn\.functional\.hardsigmoid .*float64.*: gradient 0: differs by 2\.\de-09": "TorchScript's 1/6, rounded to float64; eager mode's is rounded to float32",
    r"^nn\.functional\.batch_norm .*bfloat16 2x1 1 1 1 1: gradient 0: differs by 0\.00(15|095)": "a batch of two numbers, whose gradient is 1e-7: ours has it, PyTorch's rounding error is 1e-3, by what numbers a version's samples draw",
    r"^cat  error .*Cast error details": "the arguments are no tensors: the error of PyTorch's binding of custom operators is another than that of torch.cat",
}
