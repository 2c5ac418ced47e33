"""PyTorch's own sample database, and how a result of ours is compared with PyTorch's."""
import logging
import sys
import types
import unittest
import warnings

import torch

warnings.filterwarnings("ignore")  # of the samples: deprecated arguments and the like
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
if "expecttest" not in sys.modules:  # torch.testing._internal wants this class alone, and nothing here runs it
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db  # noqa: E402, F401

MODULES = {info.name: info for info in module_db}
OPERATORS = {(info.name, info.variant_test_name): info for info in op_db}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)

# Largest difference of two results, relative to the largest element.
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def tensors(x):
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [t for item in x for t in tensors(item)] if isinstance(x, (tuple, list)) else []


def fresh(x):
    """New leaves in place of its tensors, with their values and strides."""
    if isinstance(x, torch.Tensor):
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if 0 not in x.stride() and not x.is_sparse else torch.empty_like(x)
        return copy.copy_(x.detach()).requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {k: fresh(v) for k, v in x.items()}
    return type(x)(fresh(v) for v in x) if type(x) in (tuple, list) else x


def shapes(*x):
    return " ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors(list(x)))


def cotangent(t):
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(t.numel()), dtype=torch.float64).to(t.dtype)


def step(f, leaves, second=False):
    """What f() gives: {"output": tensors, "gradient": of the leaves, "second": gradients of the gradients, "requires_grad": of the outputs}; or the exception."""
    torch.manual_seed(0)
    try:
        outputs = tensors(f())
        wanted = [t for t in leaves if t.requires_grad]
        sources = [t for t in outputs if t.requires_grad]
        result = {"output": [t.detach().clone(memory_format=torch.preserve_format) for t in outputs], "gradient": [], "second": []}
        result["requires_grad"] = [t.requires_grad for t in outputs]
        if wanted and sources:
            grads = torch.autograd.grad(sources, wanted, [cotangent(t) for t in sources], allow_unused=True, create_graph=second)
            again = [t for t in grads if t is not None and t.requires_grad] if second else []
            result["gradient"] = [g if g is None else g.detach() for g in grads]
            if again:
                result["second"] = list(torch.autograd.grad(again, wanted, [cotangent(t) for t in again], allow_unused=True))
        return result
    except Exception as error:  # whatever PyTorch raises is to be raised by us
        return error


def difference(ours, pytorch):
    """What is wrong with a tensor of ours in one sentence; empty: nothing."""
    if ours is None or pytorch is None:
        return "" if ours is pytorch else f"{'None' if ours is None else 'numbers'} where PyTorch has {'None' if pytorch is None else 'numbers' if pytorch.any() else 'zeros'}"
    if ours.shape != pytorch.shape or ours.dtype != pytorch.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} in place of {pytorch.dtype} {tuple(pytorch.shape)}"
    if not pytorch.is_floating_point() and not pytorch.is_complex():
        return "" if torch.equal(ours, pytorch) else "other integers"
    if pytorch.numel() == 0:
        return ""
    wide = torch.complex128 if pytorch.is_complex() else torch.float64
    a, b = ours.to(wide), pytorch.to(wide)
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a[a.isinf()], b[b.isinf()]):
        return "NaN or infinity elsewhere"
    finite = a.isfinite() & b.isfinite()
    if not finite.any():
        return ""
    worst, scale = (a - b)[finite].abs().max().item(), max(b[finite].abs().max().item(), 1e-2)
    return "" if worst <= TOLERANCE[pytorch.dtype] * scale else f"differs by {worst:.2g} where numbers are up to {scale:.2g}"


def last_line(error):
    return f"{type(error).__name__}: " + ([line for line in str(error).strip().splitlines() if line.strip()] or [""])[-1].removeprefix("RuntimeError: ")


def compare(ours, pytorch, strides=True):
    """What differs between two results of step(), as sentences, and the number of comparisons."""
    if isinstance(pytorch, Exception) or isinstance(ours, Exception):
        if isinstance(pytorch, Exception) and isinstance(ours, Exception):
            return ([] if last_line(ours) == last_line(pytorch) else [f"raises {last_line(ours)!r} where PyTorch raises {last_line(pytorch)!r}"]), 1
        return [f"raises {last_line(ours)!r}" if isinstance(ours, Exception) else f"does not raise PyTorch's {last_line(pytorch)!r}"], 1
    found, checks = [], 1
    for what in ("output", "gradient", "second"):
        a, b = ours[what], pytorch[what]
        if len(a) != len(b):
            found.append(f"{len(a)} {what}s in place of {len(b)}")
        for i, (x, y) in enumerate(zip(a, b)):
            checks += 1
            if sentence := difference(x, y):
                found.append(f"{what} {i}: {sentence}")
            elif strides and what == "output":
                checks += 1
                if x.numel() and x.stride() != y.stride():
                    found.append(f"{what} {i}: strides {x.stride()} in place of {y.stride()} of {tuple(x.shape)}")
    if ours["requires_grad"] != pytorch["requires_grad"]:
        found.append(f"requires_grad: {ours['requires_grad']} in place of {pytorch['requires_grad']}")
    return found, checks
