"""Gradients that are differentiated again (create_graph) through what backward makes again, against PyTorch's operators in float64."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from differentiable_cases import CASES, WAYS, fresh, norm, ops, ours_norm, pytorchs_norm
from op_checks import live_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel


def twice(f, leaves, seed=1):
    """The gradients of f's square, and those of their squares."""
    out = f(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    first = torch.autograd.grad((out * out.detach().cos() * cotangent + out.square()).sum(), wanted, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted, allow_unused=True)]


def by_pytorch(f, leaves):
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's other operator has no second derivatives
        return twice(lambda x, *rest: f(F.silu(x), *rest), leaves)


def close(own, pytorch):
    for a, e in zip(own, pytorch, strict=True):
        # Where PyTorch has zeros, nothing may depend on it here.
        torch.testing.assert_close(torch.zeros_like(e) if a is None and e is not None else a, e, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_as_pytorchs(name):
    leaves, ours, pytorch = CASES[name]
    # All operands that need gradients, and all but one of them.
    some = [tuple(i != k for i in range(len(leaves))) for k in range(len(leaves))]
    for needs in [(True,) * len(leaves), *some]:
        if name.startswith("convolution, batch norm") and not needs[1]:
            continue  # refused by name: test_norm.py
        want = by_pytorch(pytorch, fresh(leaves, needs))
        for again in WAYS:
            close(twice(lambda x, *rest: ours(again, ops.act(x, "silu", [], again), *rest), fresh(leaves, needs)), want)  # noqa: B023


@pytest.mark.parametrize("name", [n for n in CASES if "mask" not in n])
def test_channels_last_and_float32(name):
    """Another layout gives the same numbers, float32 gives them roughly."""
    leaves, ours, pytorch = CASES[name]
    last = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in leaves]
    want = by_pytorch(pytorch, fresh(leaves))
    close(twice(lambda x, *rest: ours(1, ops.act(x, "silu", [], 1), *rest), fresh(last)), want)
    single = fresh([t.float() for t in leaves])
    got = twice(lambda x, *rest: ours(1, ops.act(x, "silu", [], 1), *rest), single)
    largest = max(float(w.detach().abs().max()) for w in want)  # some are zero but for their rounding
    for g, w in zip(got, want, strict=True):
        if g is not None:
            assert g.dtype == torch.float32
            torch.testing.assert_close(g, w.float(), rtol=1e-2, atol=1e-4 * largest)


def test_hooks_run_once_and_paths_are_counted_once():
    """Operands made from one another, and hooks on all of them."""
    x0, w0 = torch.randn(2, 8, 9, 10, dtype=torch.float64), torch.rand(8, dtype=torch.float64) + 0.5

    def f(norm, conv, product):
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        y = x.tanh()
        for t in (x, w, y):
            t.register_hook(lambda g: g * 2)
        z = norm(y, w * y.mean((0, 2, 3)), w)
        z.register_hook(lambda g: g * 3)
        out = product(conv(z, z[:1, :, :3, :3].mean(0, keepdim=True)), w.mean())
        first = torch.autograd.grad(out.square().sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))]

    want = f(lambda y, w, b: F.silu(pytorchs_norm(y, w, b, True)), F.conv2d, torch.mul)
    for r in WAYS:
        close(f(lambda y, w, b: ours_norm(ops.batch_norm_act, y, w, b, True, "silu", [], r), lambda z, w: ops.conv2d(z, w, recompute=r), lambda a, b: ops.mul(a, b, r)), want)  # noqa: B023


def test_a_convolution_whose_norm_alone_is_trained():
    x, c = torch.randn(2, 8, 10, 9, dtype=torch.float64), torch.randn(8, 8, 3, 3, dtype=torch.float64)
    for training, frozen in itertools.product((True, False), (True, False)):
        found = []
        for again in (None, False, True):
            weight = c.clone().requires_grad_(not frozen)
            w, b = (t.requires_grad_() for t in (torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)))
            statistics = norm(training)(x)[0]
            if again is None:
                out = F.silu(F.batch_norm(F.conv2d(x, weight, padding=1), *statistics, w, b, training, 0.1, 1e-5))
            else:
                out = ops.conv_batch_norm_act(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, w, b, *statistics, training, 0.1, 1e-5, True, "silu", [], again)
            first = torch.autograd.grad(out.square().sum(), (w, b), create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (w, b) if frozen else (w, b, weight))])
        close(found[1], found[0])
        close(found[2], found[0])


def test_third_derivatives():
    x, w = torch.randn(2, 40, 12, dtype=torch.float64), torch.randn(12, 12, dtype=torch.float64) / 4

    def f(act, linear):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = linear(act(linear(act(a), b)), b)
        g = out.square().sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(g, a, create_graph=True)
            g = g.square().sum()
        return torch.autograd.grad(g, (a, b))

    for r in WAYS:
        close(f(lambda t: ops.act(t, "tanh", [], r), lambda t, w: ops.linear(t, w, None, r)), f(torch.tanh, F.linear))  # noqa: B023


@pytest.mark.parametrize("name", CASES)
def test_nothing_stays(name):
    """A graph of gradients goes with its last user: what is made again has no part of the graph in a circle."""
    leaves, ours, _ = CASES[name]
    gc.disable()
    try:

        def left():
            twice(lambda x, *rest: ours(1, ops.act(x, "silu", [], 1), *rest), fresh(leaves))
            return torch.empty(0)

        assert live_bytes(left) == 0
    finally:
        gc.enable()
