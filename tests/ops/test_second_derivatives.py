"""Gradients that are differentiated again (create_graph) through what backward makes again, against PyTorch's operators in float64."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
import tsmem  # noqa: F401  loads the operators
from op_checks import live_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel

ops = torch.ops.tsmem
SDPA = F.scaled_dot_product_attention
WAYS = (0, 1, 2, 3)  # the argument `recompute`: kept, held for those nearby, made by each, cheap layers too


def norm(training):
    def arguments(t):
        c = t.shape[1]
        return (torch.linspace(-0.1, 0.1, c, dtype=t.dtype), torch.linspace(0.5, 2, c, dtype=t.dtype)), training

    return arguments


def pytorchs_norm(t, w, b, training):
    (mean, var), _ = norm(training)(t)
    return F.batch_norm(t, mean, var, w, b, training, 0.1, 1e-5)


def ours_norm(op, t, w, b, training, *rest):
    (mean, var), _ = norm(training)(t)
    return op(t, w, b, mean, var, training, 0.1, 1e-5, True, *rest)


def image(*channels):
    return [torch.randn(2, c, 10, 9, dtype=torch.float64) for c in channels]


def numbers(*shapes):
    return [torch.randn(s, dtype=torch.float64) / 2 for s in shapes]


# Name: leaves, ours (of `again` and the leaves), PyTorch's. The first leaf is a silu's input, whose output is made again.
def cases():
    torch.manual_seed(0)
    found = {}
    for training, kind in itertools.product((True, False), ("relu", "silu", "identity", "leaky_relu")):
        args = [0.1] if kind == "leaky_relu" else []
        plain = {"relu": F.relu, "silu": F.silu, "identity": lambda t: t, "leaky_relu": lambda t: F.leaky_relu(t, 0.1)}[kind]
        name = f"{kind} {'training' if training else 'evaluation'}"
        found[f"batch norm, {name}"] = (
            [*image(8), *numbers(8, 8, (4, 8, 3, 3))],
            lambda r, x, w, b, c, k=kind, a=args, t=training: ops.conv2d(ours_norm(ops.batch_norm_act, x, w, b, t, k, a, r), c, None, [1, 1], [1, 1], recompute=r),
            lambda x, w, b, c, p=plain, t=training: F.conv2d(p(pytorchs_norm(x, w, b, t)), c, padding=1),
        )  # fmt: skip
        found[f"batch norm and sum, {name}"] = (
            [*image(8, 8), *numbers(8, 8)],
            lambda r, x, y, w, b, k=kind, a=args, t=training: ops.act(ours_norm(ops.batch_norm_add_act, x, w, b, t, y, k, a, r), "tanh", [], r),
            lambda x, y, w, b, p=plain, t=training: torch.tanh(p(pytorchs_norm(x, w, b, t) + y)),
        )  # fmt: skip
        found[f"batch norm and max pool, {name}"] = (
            [*image(8), *numbers(8, 8)],
            lambda r, x, w, b, k=kind, a=args, t=training: ours_norm(ops.batch_norm_act_max_pool2d, x, w, b, t, k, a, [3, 3], [2, 2], [1, 1], [1, 1], True, r),
            lambda x, w, b, p=plain, t=training: F.max_pool2d(p(pytorchs_norm(x, w, b, t)), 3, 2, 1, ceil_mode=True),
        )  # fmt: skip
        found[f"convolution, batch norm, {name}"] = (
            [*image(8), *numbers((8, 8, 3, 3), 8, 8, 8)],
            lambda r, x, c, d, w, b, k=kind, a=args, t=training: ops.conv_batch_norm_act(
                x, c, d, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, w, b, *norm(t)(x)[0], t, 0.1, 1e-5, True, k, a, bool(r)),
            lambda x, c, d, w, b, p=plain, t=training: p(pytorchs_norm(F.conv2d(x, c, d, padding=1), w, b, t)),
        )  # fmt: skip
        if kind == "silu":  # PyTorch's own derivatives forget a bias without a weight
            found[f"batch norm with a bias alone, {name}"] = (
                [*image(8), *numbers(8)],
                lambda r, x, b, t=training: ours_norm(ops.batch_norm_act, x, None, b, t, "silu", [], r),
                lambda x, b, t=training: F.silu(pytorchs_norm(x, torch.ones_like(b), b, t)),
            )
    found["norms with a bias alone"] = (
        [*image(8), *numbers(8, 9)],
        lambda r, x, b, d: ops.group_norm_act(ops.layer_norm(x, [9], None, d, 1e-5, True, r), 4, None, b, 1e-5, True, "silu", [], r),
        lambda x, b, d: F.silu(F.group_norm(F.layer_norm(x, [9], torch.ones_like(d), d), 4, torch.ones_like(b), b)),
    )
    found["instance norm"] = (
        [*image(8), *numbers(8, 8)],
        lambda r, x, w, b: ops.instance_norm_act(x, w, b, None, None, True, 0.1, 1e-5, True, "silu", [], r),
        lambda x, w, b: F.silu(F.instance_norm(x, weight=w, bias=b)),
    )
    found["group norm and layer norm"] = (
        [*image(8), *numbers(8, 8, 9, 9)],
        lambda r, x, w, b, v, d: ops.layer_norm(ops.group_norm(x, 4, w, b, 1e-5, True, r), [9], v, d, 1e-5, True, r),
        lambda x, w, b, v, d: F.layer_norm(F.group_norm(x, 4, w, b), [9], v, d),
    )
    found["group norm with its activation"] = (
        [*image(8), *numbers(8, 8)],
        lambda r, x, w, b: ops.group_norm_act(x, 4, w, b, 1e-5, True, "silu", [], r),
        lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)),
    )
    found["squeeze and excite"] = (
        [*image(8), *numbers((2, 8, 1, 1))],
        lambda r, x, s: ops.conv2d(ops.mul_act(ops.act(x, "silu", [], r), s, x, "silu", [], r), torch.ones(2, 8, 1, 1, dtype=x.dtype), recompute=r),
        lambda x, s: F.conv2d(F.silu(x) * s, torch.ones(2, 8, 1, 1, dtype=x.dtype)),
    )
    found["squeeze and excite of a norm"] = (
        [*image(8), *numbers((2, 8, 1, 1), 8, 8)],
        lambda r, x, s, w, b: excited(r, x, s, w, b),
        lambda x, s, w, b: F.silu(pytorchs_norm(x, w, b, True)) * s,
    )
    rows = torch.randn(2, 40, 12, dtype=torch.float64)
    found["layers of a transformer"] = (
        [rows, *numbers(12, (24, 12), 24, (12, 24), 12)],
        lambda r, x, g, w, b, v, c: ops.linear(ops.act(ops.linear(ops.rms_norm(x, [12], g, 1e-6, r), w, b, r), "gelu", [], r), v, c, r),
        lambda x, g, w, b, v, c: F.linear(F.gelu(F.linear(F.rms_norm(x, [12], g, 1e-6), w, b)), v, c),
    )
    found["a layer by addmm"] = (
        [rows.flatten(0, 1), *numbers((12, 30), 30, (30, 5))],
        lambda r, x, w, b, v: ops.mm(ops.act(ops.addmm(b, x, w, recompute=r), "tanh", [], r), v, r),
        lambda x, w, b, v: torch.mm(torch.tanh(torch.addmm(b, x, w)), v),
    )
    heads = torch.randn(2, 3, 24, 6, dtype=torch.float64)
    for causal in (False, True):
        found[f"attention{', causal' if causal else ''}"] = (
            [heads, *(torch.randn_like(heads) for _ in range(2))],
            lambda r, q, k, v, c=causal: ops.scaled_dot_product_attention(q, ops.act(k, "tanh", [], r), v, None, 0.0, c, recompute=r),
            lambda q, k, v, c=causal: SDPA(q, torch.tanh(k), v, is_causal=c),
        )
    found["attention with a mask that learns"] = (
        [heads, *(torch.randn_like(heads) for _ in range(2)), torch.randn(3, 24, 24, dtype=torch.float64)],
        lambda r, q, k, v, m: ops.scaled_dot_product_attention(q, k, v, m, recompute=r),
        lambda q, k, v, m: SDPA(q, k, v, m),
    )
    found["attention in parts"] = (
        [heads, torch.randn_like(heads)],
        lambda r, q, k: ops.matmul(ops.softmax(ops.matmul(q, k.mT, r), -1, None, r), ops.act(k, "tanh", [], r), r),
        lambda q, k: torch.softmax(q @ k.mT, -1) @ torch.tanh(k),
    )
    found["factors that are copied"] = (
        [torch.randn(3, 1, 24, 6, dtype=torch.float64), torch.randn(4, 6, 24, dtype=torch.float64)],
        lambda r, a, b: ops.matmul(a.expand(3, 4, 24, 6), b, r),
        lambda a, b: a.expand(3, 4, 24, 6) @ b,
    )
    found["cheap operators"] = (
        [*image(8), *numbers((8, 1, 1))],
        lambda r, x, s: ops.cat([ops.exp(ops.mul(x, s, r), r), ops.div(x, ops.add(ops.square(x, r), s.square() + 1, 1, r), r), ops.sqrt(ops.square(x, r) + 1, r)], 1, r),
        lambda x, s: torch.cat([torch.exp(x * s), x / (x.square() + s.square() + 1), torch.sqrt(x.square() + 1)], 1),
    )  # fmt: skip
    found["prelu and glu"] = (
        [*image(8), *numbers(8)],
        lambda r, x, w: ops.glu(ops.prelu(x, w, r), 1, r),
        lambda x, w: F.glu(F.prelu(x, w), 1),
    )
    found["transposed convolution"] = (
        [*image(8), *numbers((8, 4, 3, 3), 4)],
        lambda r, x, w, b: ops.conv_transpose2d(x, w, b, [2, 2], [1, 1], [1, 1], recompute=r),
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1),
    )
    classes, target = torch.randn(60, 11, dtype=torch.float64), torch.arange(60) % 11
    found["cross entropy"] = (
        [classes, *numbers((11, 11))],
        lambda r, x, w: ops.cross_entropy_loss(ops.linear(x, w, None, r), target),
        lambda x, w: F.cross_entropy(F.linear(x, w), target),
    )
    return found


def excited(r, x, s, w, b):
    (mean, var), _ = norm(True)(x)
    out, mean, invstd = ops.batch_norm_act_stats(x, w, b, mean, var, True, 0.1, 1e-5, True, "silu", [], r)
    return ops.mul_batch_norm_act(out, s, x, w, b, mean, invstd, "silu", [], r)


CASES = cases()


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


def fresh(leaves, needs=None):
    needs = needs or [True] * len(leaves)
    return [t.clone().requires_grad_(n) for t, n in zip(leaves, needs, strict=True)]


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
