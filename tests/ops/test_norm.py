"""The normalisation ops against compositions of ATen ops: values, gradients, what is kept, dtypes, layouts, errors."""

import itertools
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from op_checks import hardsigmoid
from torch.autograd.graph import saved_tensors_hooks

ACTS = {
    "identity": ([], lambda x: x),
    "relu": ([], torch.relu),
    "hardtanh": ([-0.5, 0.8], lambda x: F.hardtanh(x, -0.5, 0.8)),
    "threshold": ([0.1, -0.3], lambda x: F.threshold(x, 0.1, -0.3)),
    "leaky_relu": ([0.01], F.leaky_relu),
    "hardsigmoid": ([], hardsigmoid),
    "silu": ([], F.silu),
    "hardswish": ([], F.hardswish),
    "gelu": ([], F.gelu),
    "gelu_tanh": ([], lambda x: F.gelu(x, approximate="tanh")),
    "sigmoid": ([], torch.sigmoid),
    "tanh": ([], torch.tanh),
    "elu": ([1.2, 1.1, 0.9], lambda x: torch.ops.aten.elu(x, 1.2, 1.1, 0.9)),
    "softplus": ([1.3, 5.0], lambda x: F.softplus(x, 1.3, 5.0)),
    "mish": ([], F.mish),
    "hardsigmoid_eager": ([], F.hardsigmoid),
}
ONE_BIT = ["relu", "hardtanh", "threshold", "leaky_relu", "hardsigmoid", "hardsigmoid_eager"]
CONTIGUOUS, LAST, LAST_3D = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
# Odd sizes, rows shorter and longer than a chunk, one channel, one value a row, more channels than a period.
SHAPES = [
    ((4, 5, 7, 9), CONTIGUOUS), ((4, 5, 7, 9), LAST), ((33, 12), CONTIGUOUS), ((2, 13, 31), CONTIGUOUS), ((3, 4, 3, 10, 2), LAST_3D),
    ((3, 4, 3, 10, 2), CONTIGUOUS), ((2, 1, 37, 41), LAST), ((1, 3, 41, 53), CONTIGUOUS), ((6, 70, 1, 1), CONTIGUOUS),
    ((3, 260, 2, 3), LAST), ((5, 1, 11), CONTIGUOUS),
]  # fmt: skip


class Case:
    """Inputs in float64 that a dtype can represent, and one run of an op on them as that or another dtype."""

    def __init__(self, shape, layout=CONTIGUOUS, dtype=torch.float64, seed=0, affine=True, stats=True, params=None):
        gen = torch.Generator().manual_seed(seed)
        rand = lambda *s: torch.randn(*s, generator=gen, dtype=torch.float64).to(dtype).double()  # noqa: E731
        c = shape[1]
        self.layout, self.dtype, self.params = layout, dtype, params or dtype
        self.x, self.z = rand(*shape) * 2 + 1, rand(*shape)
        self.x = self.x.to(dtype).double()
        self.w, self.b = (rand(c).abs() + 0.5, rand(c)) if affine else (None, None)
        self.w = self.w.to(dtype).double() if affine else None
        self.m, self.v = (rand(c), (rand(c).abs() + 0.5).to(dtype).double()) if stats else (None, None)
        self.gen, self.rand = gen, rand
        self.cotangent = None

    def run(self, f, dtype=None, needs=(True, True, True, True)):
        """f(x, w, b, m, v, z) -> output: the output, gradients of x, w, b, z (None where not asked for), running statistics."""
        dtype = dtype or self.dtype
        params = torch.float64 if dtype == torch.float64 else self.params
        fmap = lambda t: t.to(dtype, copy=True).contiguous(memory_format=self.layout)  # noqa: E731
        vec = lambda t: None if t is None else t.to(params, copy=True)  # noqa: E731
        x, z, w, b, m, v = fmap(self.x), fmap(self.z), vec(self.w), vec(self.b), vec(self.m), vec(self.v)
        leaves = [x, w, b, z]
        for leaf, need in zip(leaves, needs):
            if leaf is not None and need:
                leaf.requires_grad_()
        out = f(x, w, b, m, v, z)
        if self.cotangent is None:
            self.cotangent = self.rand(*out.shape)
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, self.cotangent.to(out.dtype), allow_unused=True) if out.requires_grad else [])
        found = [next(grads, None) if t is not None and t.requires_grad else None for t in leaves]
        return [out.detach(), *found, m, v]


def pytorch(act, train, add=False, eps=1e-5, momentum=0.1):
    def f(x, w, b, m, v, z):
        n = torch.batch_norm(x, w, b, m, v, train, momentum, eps, True)
        return ACTS[act][1](n + z if add else n)

    return f


def fused(ops, act, train, add=False, eps=1e-5, momentum=0.1):
    def f(x, w, b, m, v, z):
        if add:
            return ops.batch_norm_add_act(x, w, b, m, v, train, momentum, eps, True, z, act, ACTS[act][0])
        return ops.batch_norm_act(x, w, b, m, v, train, momentum, eps, True, act, ACTS[act][0])

    return f


def same(ours, theirs, rtol=1e-9, atol=1e-11):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def as_good(ours, theirs, exact):
    """Each result's error against float64 is at most twice PyTorch's, or two units in the last place of its norm."""
    assert ours[0].stride() == theirs[0].stride()
    for i, (a, b, c) in enumerate(zip(ours, theirs, exact)):
        if a is None:
            assert b is None
            continue
        assert a.dtype == b.dtype and a.shape == b.shape
        norm = c.norm().item()
        error, bound = (a.double() - c).norm().item(), (b.double() - c).norm().item()
        assert error <= 2 * bound + 2 * torch.finfo(a.dtype).eps * norm, (i, error, bound, norm)


@pytest.mark.parametrize("layout", (CONTIGUOUS, LAST))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("add", (False, True))
@pytest.mark.parametrize("train", (False, True))
@pytest.mark.parametrize("act", list(ACTS))
def test_a_gradient_that_nobody_holds_lends_its_memory(ops, act, train, add, dtype, layout):
    """The gradients are the same, bit for bit, as where somebody holds it, whose tensor stays as it was; and one tensor less is there."""
    import allocator

    case = Case((4, 16, 21, 17), layout, dtype)
    held = []

    ours = fused(ops, act, train, add)

    def run(hold):
        def f(x, w, b, m, v, z):
            y = ours(x * 1.0, w, b, m, v, z * 1.0)
            if hold:
                y.register_hook(lambda grad: held.append((grad, grad.clone())))
            return y * 2.0

        return case.run(f)

    for a, b in zip(run(False), run(True)):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert all(torch.equal(grad, copy) for grad, copy in held) and held

    if dtype == torch.float32:
        fmap = lambda t: t.to(dtype, copy=True).contiguous(memory_format=layout).requires_grad_()  # noqa: E731
        x, z = fmap(case.x) * 1.0, fmap(case.z) * 1.0
        vectors = [t.to(dtype, copy=True) for t in (case.w, case.b, case.m, case.v)]
        y = ours(x, *vectors, z) * 2.0
        g, wanted = torch.ones_like(y), [x, z] if add else [x]
        peak = allocator.most_held(lambda: torch.autograd.grad(y, wanted, g))
        lent = not (add and act == "identity")  # there the gradient itself is z's
        assert peak < (len(wanted) + (0.5 if lent else 1.5)) * x.nbytes


@pytest.mark.parametrize("norm", ("batch_norm_act", "group_norm_act"))
@pytest.mark.parametrize("layout,other", ((CONTIGUOUS, LAST), (LAST, CONTIGUOUS)))
def test_a_gradient_in_another_layout_is_copied_once(ops, layout, other, norm):
    """Its copy in the map's layout becomes the input's gradient; somebody else's tensor stays as it was."""
    import allocator

    x = torch.randn(4, 16, 21, 17).contiguous(memory_format=layout).requires_grad_()
    grad = torch.randn(4, 16, 21, 17).contiguous(memory_format=other)
    before = grad.clone()
    for act, f in (("relu", F.relu), ("silu", F.silu)):
        if norm == "batch_norm_act":
            ours, theirs = ops.batch_norm_act(x, None, None, None, None, True, 0.1, 1e-5, True, act, []), f(F.batch_norm(x, None, None, training=True))
        else:
            ours, theirs = ops.group_norm_act(x, 4, None, None, 1e-5, True, act, []), f(F.group_norm(x, 4))
        peak = allocator.most_held(lambda ours=ours: torch.autograd.grad(ours, x, grad, retain_graph=True))
        assert peak < 1.5 * x.nbytes
        torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs)), rtol=1e-4, atol=1e-5)
        assert torch.equal(grad, before)


@pytest.mark.parametrize("add", [False, True], ids=["plain", "add"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("act", ACTS)
def test_float64_equals_pytorch(ops, act, train, add):
    for shape, layout in SHAPES:
        case = Case(shape, layout)
        ours, theirs = case.run(fused(ops, act, train, add)), case.run(pytorch(act, train, add))
        assert ours[0].stride() == theirs[0].stride() and ours[1].stride() == theirs[1].stride()
        same(ours if add else ours[:4] + ours[5:], theirs if add else theirs[:4] + theirs[5:])


@pytest.mark.parametrize("dtype,params", [
    (torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("act", ACTS)
def test_error_is_at_most_twice_pytorchs(ops, act, train, dtype, params):
    for add, (shape, layout) in itertools.product([False, True], SHAPES[:4]):
        case = Case(shape, layout, dtype, params=params)
        exact, ours = case.run(pytorch(act, train, add), torch.float64), case.run(fused(ops, act, train, add))
        theirs = case.run(pytorch(act, train, add))
        if not add:
            exact, ours, theirs = exact[:4] + exact[5:], ours[:4] + ours[5:], theirs[:4] + theirs[5:]
        as_good(ours, theirs, exact)


@pytest.mark.parametrize("act", ["identity", "relu", "silu"])
def test_every_combination_of_requires_grad(ops, act):
    for train, add, affine, stats in itertools.product([True, False], repeat=4):
        if not train and not stats:
            continue
        case = Case((3, 4, 5, 3), LAST, affine=affine, stats=stats)
        for needs in itertools.product([True, False], [True, False] if affine else [True], [True, False], [True, False] if add else [True]):
            ours, theirs = (case.run(f, needs=needs) for f in (fused(ops, act, train, add), pytorch(act, train, add)))
            if not add:
                ours[4] = theirs[4] = None
            same(ours, theirs)


@pytest.mark.parametrize("act", ACTS)
def test_gradcheck(ops, act):
    args = ACTS[act][0]
    torch.manual_seed(1)
    for shape, layout in [((3, 2, 2, 3), CONTIGUOUS), ((3, 2, 2, 3), LAST)]:
        x, z = (torch.randn(shape, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_() for _ in range(2))
        w, b = (torch.rand(2, dtype=torch.float64) + 0.5).requires_grad_(), torch.randn(2, dtype=torch.float64).requires_grad_()
        m, v = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        for train in (True, False):
            plain = lambda x, w, b: ops.batch_norm_act(x, w, b, m, v, train, 0.0, 1e-5, True, act, args)  # noqa: E731, B023
            added = lambda x, w, b, z: ops.batch_norm_add_act(x, w, b, m, v, train, 0.0, 1e-5, True, z, act, args)  # noqa: E731, B023
            assert torch.autograd.gradcheck(plain, (x, w, b), atol=1e-6)
            assert torch.autograd.gradcheck(added, (x, w, b, z), atol=1e-6)


def test_no_elements_and_one_value(ops):
    for shape in [(0, 3, 4, 4), (2, 3, 0, 4), (1, 3, 1, 1)]:
        for train in (True, False):
            case = Case(shape)
            same(case.run(fused(ops, "relu", train))[:4], case.run(pytorch("relu", train))[:4])


@pytest.mark.parametrize("act", ACTS)
def test_nan_and_infinity(ops, act):
    special = [float("nan"), -float("inf"), 0.0, -0.0, 1e-30, 100.0, -100.0, 3.0, -3.0, 0.8, -0.5, 0.1]
    if act not in ("gelu", "mish"):  # there PyTorch's infinity becomes NaN for some dtypes; ours stays
        special.append(float("inf"))
    one, zero = torch.ones(1), torch.zeros(1)
    for layout, dtype in itertools.product([CONTIGUOUS, LAST], [torch.float32, torch.float64]):
        x = torch.tensor(special, dtype=dtype).view(1, 1, 1, -1)
        p = [t.to(dtype) for t in (one, zero, zero, one)]
        # PyTorch's vectors and its scalar remainders differ in the gradient at NaN: either will do.
        allowed = []
        for pieces in (x.repeat(32, 1, 1, 1).unsqueeze(0), x.flatten()):
            results = []
            for piece in pieces:
                leaf = piece.reshape(-1).clone().requires_grad_()
                out = ACTS[act][1](leaf)
                results.append([out.detach(), torch.autograd.grad(out, leaf, torch.full_like(out, 2.0))[0]])
            allowed.append([torch.cat(r)[: x.numel()].view_as(x) for r in zip(*results)])
        for add in (False, True):
            leaf = x.clone().contiguous(memory_format=layout).requires_grad_()
            out = fused(ops, act, False, add, eps=0.0)(leaf, *p, torch.zeros_like(x))
            mine = [out.detach(), torch.autograd.grad(out, leaf, torch.full_like(out, 2.0))[0]]
            for got, *either in zip(mine, *allowed):
                fits = [torch.isclose(got, t, rtol=1e-5, atol=1e-6, equal_nan=True) for t in either]
                assert (fits[0] | fits[1]).all(), (got, either)


def test_nan_and_infinity_in_statistics(ops):
    for value, layout in itertools.product([float("nan"), float("inf"), 1e15, 1e30], [CONTIGUOUS, LAST]):
        x = torch.randn(2, 3, 4, 4).contiguous(memory_format=layout)
        x[1, 1, 2, 3] = value
        stats = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]
        ours = fused(ops, "relu", True)(x, None, None, *stats[0], None)
        # The square of 1e30 is no float: PyTorch's float32 output there is 0, its float64 output is right.
        theirs = pytorch("relu", True)(x.double(), None, None, *(t.double() for t in stats[1]), None).float() if value == 1e30 else None
        if theirs is None:
            theirs = pytorch("relu", True)(x, None, None, *stats[1], None)
            same(stats[0], stats[1], rtol=1e-5, atol=1e-7)
        same([ours], [theirs], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [CONTIGUOUS, LAST], ids=["contiguous", "channels_last"])
def test_statistics_of_large_means(ops, layout):
    torch.manual_seed(0)
    for shape in [(16, 8, 40, 40), (4, 64, 9, 9)]:
        x = (torch.randn(shape) + 1e4).contiguous(memory_format=layout)
        x[0, :, :2] = 0  # the first values are far from the mean
        exact = x.double().var(dim=(0, 2, 3), unbiased=True), x.double().mean(dim=(0, 2, 3))
        errors = []
        for f in (fused(ops, "identity", True, momentum=1.0), pytorch("identity", True, momentum=1.0)):
            m, v = torch.zeros(shape[1]), torch.ones(shape[1])
            f(x, None, None, m, v, None)
            errors.append([((v.double() - exact[0]) / exact[0]).abs().max().item(), ((m.double() - exact[1]) / exact[1]).abs().max().item()])
        assert errors[0][0] <= 2 * errors[1][0] + 1e-6 and errors[0][1] <= 2 * errors[1][1] + 1e-7, errors


@pytest.mark.parametrize("layout", [CONTIGUOUS, LAST], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_statistics_of_short_rows(ops, layout, dtype):
    """Of fewer elements than a vector has, of some vectors and a rest, of more images than are summed at a time; each image has a mean of its own."""
    torch.manual_seed(0)
    for shape in [(300, 5, 1, 3), (3, 33, 4, 4), (150, 17, 7, 7), (1, 4, 5, 9), (70, 3, 16, 22), (5, 2, 2, 255)]:
        x = (torch.randn(shape) + 10 * torch.randn(shape[0], 1, 1, 1) + 50).to(dtype).contiguous(memory_format=layout)
        exact = x.double().mean(dim=(0, 2, 3)), x.double().var(dim=(0, 2, 3), unbiased=True)
        m, v = torch.zeros(shape[1]), torch.ones(shape[1])
        fused(ops, "identity", True, momentum=1.0)(x, None, None, m, v, None)
        same([m.double(), v.double()], exact, rtol=5e-6)


def test_strides(ops):
    """Inputs, residuals and gradients of any strides give PyTorch's values, and PyTorch's strides out."""
    base = torch.randn(6, 8, 6, 10, dtype=torch.float64)
    views = [base.transpose(2, 3), base[:, :, ::2], base[::2, 1::2], base.permute(1, 0, 3, 2), base[:, :1].expand(6, 8, 6, 10),
             base.to(memory_format=LAST)[:, :, 1:], base.flip(3)]  # fmt: skip
    for x, add in itertools.product(views, [False, True]):
        z = torch.randn(x.shape, dtype=torch.float64).contiguous(memory_format=LAST)
        results = []
        for f in (fused(ops, "relu", True, add), pytorch("relu", True, add)):
            leaf, other = x.detach().requires_grad_(), z.clone(memory_format=torch.preserve_format).requires_grad_()
            out = f(leaf, None, None, None, None, other)
            assert out.shape == x.shape
            g = torch.arange(out.numel(), dtype=torch.float64).view(out.shape[::-1]).permute(3, 2, 1, 0) / out.numel()
            results.append([out.detach(), *torch.autograd.grad(out, [leaf, other] if add else [leaf], g, retain_graph=True)])
            results[-1] += torch.autograd.grad(out.sum(), leaf)  # an expanded gradient
        assert add or results[0][0].stride() == results[1][0].stride()
        same(*results)


def kept(f):
    """The result of f, and the bytes of each storage that autograd saved and that is no parameter."""
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = f()
    return out, saved


@pytest.mark.parametrize("layout", [CONTIGUOUS, LAST], ids=["contiguous", "channels_last"])
def test_kept_bytes(ops, layout):
    c, n = 16, 4 * 16 * 8 * 8
    leaf = torch.randn(4, c, 8, 8).contiguous(memory_format=layout).requires_grad_()
    y = leaf * 1  # as a convolution's output
    z = leaf * 2
    own = y.untyped_storage().data_ptr()
    m, v = torch.zeros(c), torch.ones(c)
    small = 8 * c * 4

    def bytes_of(train, add, weight_grad, act):
        w, b = torch.ones(c, requires_grad=weight_grad), torch.zeros(c, requires_grad=weight_grad)
        out, saved = kept(lambda: fused(ops, act, train, add)(y, w, b, m, v, z))
        assert out.requires_grad
        return own in saved, sum(size for ptr, size in saved.items() if ptr != own)

    for act in ["identity", *ONE_BIT]:
        bits = 0 if act == "identity" else n // 8
        for train, add, weight_grad in itertools.product([True, False], repeat=3):
            has_y, rest = bytes_of(train, add, weight_grad, act)
            assert has_y == (train or weight_grad)
            needs_bits = add or not has_y
            assert rest <= small + (bits if needs_bits else 0)
    assert bytes_of(True, False, True, "silu")[1] <= small
    assert bytes_of(True, True, True, "silu")[1] <= small + 4 * n
    assert kept(lambda: fused(ops, "relu", True)(y.detach(), None, None, m, v, None))[1] == {}
    with torch.no_grad():
        assert kept(lambda: fused(ops, "relu", True)(y, None, None, m, v, None))[1] == {}


def test_running_buffers_may_change_before_backward(ops):
    case = Case((3, 4, 5, 5))
    m, v = case.m.clone(), case.v.clone()
    x = case.x.clone().requires_grad_()
    w = case.w.clone().requires_grad_()
    out = ops.batch_norm_act(x, w, case.b, m, v, False, 0.1, 1e-5, True, "silu", [])
    m.fill_(7), v.fill_(9)
    g = torch.randn_like(out)
    ours = torch.autograd.grad(out, [x, w], g)
    theirs = torch.autograd.grad(F.silu(F.batch_norm(x, case.m, case.v, w, case.b, False, 0.1, 1e-5)), [x, w], g)
    same(ours, theirs)


def test_input_changed_before_backward_is_an_error(ops):
    y = torch.randn(2, 3, 4, 4, requires_grad=True) * 1
    w = torch.ones(3, requires_grad=True)
    for tensor in (y, w):
        out = ops.batch_norm_act(y, w, None, None, None, True, 0.1, 1e-5, True, "relu", [])
        with torch.no_grad():
            tensor.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_retain_graph_and_undefined_gradient(ops):
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    out, mean, invstd = ops.batch_norm_act_stats(x, None, None, None, None, True, 0.1, 1e-5, True, "relu", [])
    assert not mean.requires_grad and not invstd.requires_grad
    first = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(out, x, torch.ones_like(out))[0])
    flat = x.detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean, flat.mean(1))
    torch.testing.assert_close(invstd, (flat.var(1, unbiased=False) + 1e-5).rsqrt())


def make_calls(ops):
    """Name of each op and a function of a feature map (and a weight) that uses it."""
    w2 = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    return {
        "batch_norm_act": lambda x, w: ops.batch_norm_act(x, w, None, None, None, True, 0.1, 1e-5, True, "silu", []),
        "batch_norm_add_act": lambda x, w: ops.batch_norm_add_act(x, w, None, None, None, True, 0.1, 1e-5, True, x, "relu", []),
        "batch_norm_act_stats": lambda x, w: ops.batch_norm_act_stats(x, w, None, None, None, True, 0.1, 1e-5, True, "relu", [])[0],
        "batch_norm_act_max_pool2d": lambda x, w: ops.batch_norm_act_max_pool2d(
            x, w, None, None, None, True, 0.1, 1e-5, True, "relu", [], [3, 3], [2, 2], [1, 1], [1, 1], False),
        "instance_norm_act": lambda x, w: ops.instance_norm_act(x, w, None, None, None, True, 0.1, 1e-5, True, "relu", []),
        "mul_act": lambda x, w: ops.mul_act(torch.relu(x), w.view(-1, 1, 1), x, "relu", []),
        "conv_batch_norm_act": lambda x, w: ops.conv_batch_norm_act(
            x, w2.to(x.dtype), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, w, None, None, None, True, 0.1, 1e-5, True, "relu", [], False),
    }  # fmt: skip


def test_second_derivatives(ops):
    for name, f in make_calls(ops).items():
        x, w = torch.randn(2, 4, 4, 3, dtype=torch.float64, requires_grad=True), torch.ones(4, dtype=torch.float64, requires_grad=True)
        for inputs in ((x, w), (x, w.detach()), (x.detach(), w)) if name != "conv_batch_norm_act" else ():
            assert torch.autograd.gradgradcheck(f, inputs)


def test_second_derivatives_without_the_convolutions_input_are_refused_by_name(ops):
    """With a frozen weight the fused convolution keeps no input, which second derivatives would need."""
    x, w = torch.randn(2, 4, 6, 6, dtype=torch.float64, requires_grad=True), torch.ones(4, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(make_calls(ops)["conv_batch_norm_act"](x, w).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="tsmem::conv_batch_norm_act: second derivatives"):
        g.sum().backward()


def test_meta_and_fake_tensors(ops):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name, f in make_calls(ops).items():
        for layout in (CONTIGUOUS, LAST):
            x, w = torch.randn(2, 4, 6, 6).contiguous(memory_format=layout), torch.ones(4)
            real = f(x, w)
            if name != "conv_batch_norm_act":  # its weight is real here
                meta = f(x.to("meta").requires_grad_(), w.to("meta").requires_grad_())
                assert meta.is_meta and meta.shape == real.shape and meta.stride() == real.stride(), name
                meta.sum().backward()
                with FakeTensorMode() as mode:
                    fake = f(mode.from_tensor(x).requires_grad_(), mode.from_tensor(w).requires_grad_())
                    assert fake.shape == real.shape and fake.stride() == real.stride()
                    fake.sum().backward()


def test_functorch_and_forward_mode_take_the_pytorch_ops(ops):
    for name, f in make_calls(ops).items():
        x, w = torch.randn(2, 4, 6, 6, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        loss = lambda x: f(x, w).square().sum()  # noqa: E731, B023
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(leaf), leaf)[0])
        tangent = torch.randn_like(x)
        _, directional = torch.func.jvp(loss, (x,), (tangent,))
        torch.testing.assert_close(directional, (torch.autograd.grad(loss(leaf), leaf)[0] * tangent).sum())


def test_pytorchs_errors_stay(ops):
    x, c = torch.randn(2, 3, 4, 4), torch.ones(3)
    bad = [(x, None, None, None, None, False), (x, c[:2], c, c, c, True), (x, c, c, c, None, True), (x, c.double(), c, c, c, True),
           (x.long(), None, None, None, None, True), (x, c, c, c[:1], c, True), (x.bfloat16(), c.bfloat16(), None, c, c, True)]  # fmt: skip
    for x, w, b, m, v, train in bad:
        with pytest.raises(Exception) as pytorchs:
            F.batch_norm(x, m, v, w, b, train, 0.1, 1e-5) if m is None or v is not None else torch.batch_norm(x, w, b, m, v, train, 0.1, 1e-5, True)
        with pytest.raises(type(pytorchs.value)) as ours:
            ops.batch_norm_act(x, w, b, m, v, train, 0.1, 1e-5, True, "relu", [])
        assert str(ours.value).split("\n")[0] == str(pytorchs.value).split("\n")[0]
    with pytest.raises(ValueError, match="no activation is named 'rely'"):
        ops.batch_norm_act(torch.randn(2, 3, 4, 4), None, None, None, None, True, 0.1, 1e-5, True, "rely", [])


def test_other_that_broadcasts_or_promotes(ops):
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    for z in (torch.randn(3, 1, 1), torch.randn(2, 3, 4, 4).double(), torch.randn(5, 2, 3, 4, 4)):
        ours = ops.batch_norm_add_act(x, None, None, None, None, True, 0.1, 1e-5, True, z, "relu", [])
        theirs = torch.relu(F.batch_norm(x, None, None, None, None, True, 0.1, 1e-5) + z)
        same([ours.detach(), *torch.autograd.grad(ours.sum(), x)], [theirs.detach(), *torch.autograd.grad(theirs.sum(), x)], 1e-5, 1e-6)


# --- With max pooling -----------------------------------------------------------------------------------------------------------

POOLS = [((3, 3), (2, 2), (1, 1), (1, 1), False), ((2, 2), (2, 2), (0, 0), (1, 1), True), ((3, 2), (1, 2), (1, 0), (2, 1), False),
         ((5, 3), (3, 1), (2, 1), (1, 2), True), ((1, 1), (1, 1), (0, 0), (1, 1), False), ((17, 17), (3, 5), (8, 8), (1, 1), False)]  # fmt: skip


def pooled(ops, act, train, pool):
    kernel, stride, padding, dilation, ceil = pool
    ours = lambda x, w, b, m, v, z: ops.batch_norm_act_max_pool2d(  # noqa: E731
        x, w, b, m, v, train, 0.1, 1e-5, True, act, ACTS[act][0], kernel, stride, padding, dilation, ceil)  # fmt: skip
    theirs = lambda x, w, b, m, v, z: F.max_pool2d(pytorch(act, train)(x, w, b, m, v, z), kernel, stride, padding, dilation, ceil)  # noqa: E731
    return ours, theirs


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("layout", [CONTIGUOUS, LAST], ids=["contiguous", "channels_last"])
def test_max_pool(ops, layout, pool):
    for act, train, shape in itertools.product(["relu", "silu"], [True, False], [(2, 3, 19, 23), (3, 9, 32, 18)]):
        ours, theirs = pooled(ops, act, train, pool)
        case = Case(shape, layout)
        a, b = case.run(ours), case.run(theirs)
        assert a[0].stride() == b[0].stride()
        same(a[:4] + a[5:], b[:4] + b[5:])
        for needs in [(True, False, False), (False, True, False), (False, False, True), (False, False, False)]:
            same(case.run(ours, needs=(*needs, False)), case.run(theirs, needs=(*needs, False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_max_pool_error(ops, dtype):
    for layout, train in itertools.product([CONTIGUOUS, LAST], [True, False]):
        ours, theirs = pooled(ops, "relu", train, POOLS[0])
        case = Case((2, 8, 33, 30), layout, dtype)
        exact, a, b = case.run(theirs, torch.float64), case.run(ours), case.run(theirs)
        as_good(a[:1] + a[5:], b[:1] + b[5:], exact[:1] + exact[5:])
        if dtype == torch.float32:  # a window's winner may be another where values were rounded
            as_good(a[:4], b[:4], exact[:4])


def test_max_pool_ties_nan_and_big_maps(ops):
    ours, theirs = pooled(ops, "relu", False, POOLS[0])
    for layout, value in itertools.product([CONTIGUOUS, LAST], [float("nan"), float("inf"), -float("inf")]):
        case = Case((2, 3, 20, 20), layout, affine=False)
        case.x = (case.x * 2).round() / 2  # many ties
        case.x[0, 1, 3:6, 4] = value
        same(case.run(ours), case.run(theirs))
    case = Case((1, 2, 130, 700), CONTIGUOUS)
    same(case.run(ours), case.run(theirs))


def test_max_pool_with_windows_outside_the_map(ops):
    """All taps in padding: PyTorch's output is -inf there, and nothing can be recomputed from a position."""
    for pool, shape in [(((2, 2), (1, 1), (1, 0), (3, 1), False), (2, 3, 2, 400)), (((2, 2), (1, 1), (1, 1), (1, 5), False), (2, 3, 16, 4))]:
        ours, theirs = pooled(ops, "relu", True, pool)
        x = Case(shape).x
        assert torch.equal(ours(x, None, None, None, None, None), theirs(x, None, None, None, None, None))
        leaf = x.clone().requires_grad_()
        kernel, stride, padding, dilation, ceil = pool
        made = ops.batch_norm_act_max_pool2d(leaf, None, None, None, None, True, 0.1, 1e-5, True, "relu", [], kernel, stride, padding, dilation, ceil, 1)
        factor = torch.ones_like(made).requires_grad_()
        (kept_or_made,) = torch.autograd.grad(ops.mul(made, factor, 0).sum(), factor)
        same([kept_or_made], [theirs(x, None, None, None, None, None)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_max_pool_of_rows_that_fill_vectors(ops, pool, dtype):
    """Ties, NaN and infinities fall on other lanes with every width; a wrong winner shows in the input's gradient."""
    for width, height in itertools.product([34, 41, 70, 131], [7, 20]):
        if height < pool[0][0]:
            continue
        ours, theirs = pooled(ops, "relu", False, pool)
        case = Case((2, 3, height, width), CONTIGUOUS, dtype)  # with a weight that needs a gradient: else bits and positions are kept
        case.x = (case.x * 2).round() / 2
        case.m, case.b = torch.zeros(2, 3, dtype=torch.float64)
        case.v, case.w = torch.ones(2, 3, dtype=torch.float64)
        for i, value in enumerate([float("nan"), float("inf"), -float("inf")]):
            case.x[1, i, 2:5, 3 :: 7 + i] = value
        (a, dx), (b, want) = ([case.run(f)[i] for i in (0, 1)] for f in (ours, theirs))
        finite = case.x.isfinite()
        error = 1e-6 if dtype == torch.float32 else 2e-2
        same([a], [b], error, error)
        same([dx[finite]], [want[finite]], error, 2 * error)  # gradients are about 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_max_pool_of_channels_that_fill_vectors(ops, pool, dtype):
    """Channels last, fewer and more than a vector of them, with ties, NaN, infinities: outputs, recomputed too, and all gradients."""
    kernel, stride, padding, dilation, ceil = pool
    for channels, act, train in itertools.product([15, 16, 27, 40], ["relu", "leaky_relu", "silu"], [True, False]):
        case = Case((2, channels, 14, 19), LAST, dtype, params=torch.float32)
        case.x = (case.x * 2).round() / 2
        case.w, case.b, case.v = torch.ones(3, channels, dtype=torch.float64)
        case.m *= 0
        if not train:
            case.x[0, ::5, 3:6, ::4], case.x[1, ::3, 2:5, ::5], case.x[0, ::4, 4:9, 1::4] = float("nan"), float("inf"), -float("inf")
        ours, theirs = pooled(ops, act, train, pool)
        exact = case.run(theirs, torch.float64)
        a = case.run(ours)
        known = exact[0].isfinite() & (exact[0] != 0)
        error = 1e-5 if dtype == torch.float32 else 2e-2
        same([a[0].double()], [exact[0]], error, error)
        if dtype == torch.float32 or not train:  # else rounding makes other ties
            finite = case.x.isfinite()
            same([a[1].double()[finite]], [exact[1][finite]], error, 2 * error)
            if train:
                same([t.double() for t in a[2:4]], exact[2:4], 1e-4, 1e-3)
        x = case.x.to(dtype).contiguous(memory_format=LAST).requires_grad_()
        vectors = [t.float() for t in (case.w, case.b, case.m, case.v)]
        made = ops.batch_norm_act_max_pool2d(x, *vectors, train, 0.1, 1e-5, True, act, ACTS[act][0], kernel, stride, padding, dilation, ceil, 1)
        factor = torch.ones_like(made).requires_grad_()
        assert torch.equal(torch.autograd.grad(ops.mul(made, factor, 0).sum(), factor)[0][known], a[0][known])


def test_max_pool_keeps_half_a_byte_a_position(ops):
    y = torch.randn(2, 4, 32, 32, requires_grad=True) * 1
    own = y.untyped_storage().data_ptr()
    ours, _ = pooled(ops, "relu", True, POOLS[0])
    out, saved = kept(lambda: ours(y, None, None, None, None, None))
    assert own in saved
    assert sum(size for ptr, size in saved.items() if ptr != own) <= out.numel() // 2 + 256


# --- Scales ---------------------------------------------------------------------------------------------------------------------

SCALES = [((4, 5, 7, 9), (4, 5, 1, 1)), ((4, 5, 7, 9), (5, 1, 1)), ((4, 5, 7, 9), (1, 5, 1, 1)), ((4, 5, 7, 9), (9,)), ((4, 5, 7, 9), (4, 1, 1, 1)),
          ((4, 5, 7, 9), (4, 5, 7, 9)), ((4, 5, 7, 9), (7, 1)), ((33, 12), (12,)), ((33, 12), (33, 1)), ((2, 70, 1, 1), (2, 70, 1, 1)),
          ((4, 5, 7, 9), ()), ((1, 3, 50, 50), (1, 3, 1, 1)), ((2, 5, 6), (2, 5, 1))]  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_mul_act(ops, act):
    args, f = ACTS[act]
    for (shape, scale), layout in itertools.product(SCALES, [CONTIGUOUS, LAST]):
        if layout == LAST and len(shape) != 4:
            continue
        torch.manual_seed(0)
        x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=layout)
        s = torch.randn(scale, dtype=torch.float64)
        g = torch.randn(shape, dtype=torch.float64)
        for needs in itertools.product([True, False], repeat=2):
            results = []
            for ours in (True, False):
                a, b = x.clone(memory_format=torch.preserve_format).requires_grad_(needs[0]), s.clone().requires_grad_(needs[1])
                out = ops.mul_act(f(a), b, a, act, args) if ours else f(a) * b
                leaves = [t for t in (a, b) if t.requires_grad]
                results.append([out.detach(), *(torch.autograd.grad(out, leaves, g) if leaves else [])])
                assert out.stride() == (f(a) * b).stride()
            same(*results)


def test_mul_batch_norm_act_with_parameters_that_do_not_fit(ops):
    """They are not read: the product is PyTorch's."""
    a, scale, x = torch.randn(2, 64, 4, 4, requires_grad=True), torch.rand(2, 64, 1, 1, requires_grad=True), torch.randn(2, 64, 4, 4)
    for w, b, invstd in [(torch.ones(1), None, torch.ones(64)), (None, torch.ones(8, 8), torch.ones(64)), (None, None, torch.ones(3))]:
        y = ops.mul_batch_norm_act(a, scale, x, w, b, torch.zeros(64), invstd, "silu", [])
        torch.testing.assert_close(torch.autograd.grad(y.sum(), scale)[0], a.detach().sum((2, 3), keepdim=True))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_mul_batch_norm_act(ops, train, affine):
    for (shape, scale), layout in itertools.product(SCALES, [CONTIGUOUS, LAST]):
        if layout == LAST and len(shape) != 4:
            continue
        case = Case(shape, layout, affine=affine)
        s = torch.randn(scale, dtype=torch.float64)
        results = []
        for ours in (True, False):
            leaf = s.clone().requires_grad_()

            def f(x, w, b, m, v, z):
                if not ours:  # noqa: B023
                    return pytorch("silu", train)(x, w, b, m, v, z) * leaf  # noqa: B023
                a, mean, invstd = ops.batch_norm_act_stats(x, w, b, m, v, train, 0.1, 1e-5, True, "silu", [])
                return ops.mul_batch_norm_act(a, leaf, x, w, b, mean, invstd, "silu", [])  # noqa: B023

            results.append(case.run(f))
            results[-1].append(torch.autograd.grad(f(case.x, case.w, case.b, case.m.clone(), case.v.clone(), None), leaf, case.cotangent)[0])
        same(*results)


def test_mul_act_keeps_no_activation(ops):
    x = torch.randn(2, 8, 16, 16, requires_grad=True) * 1
    a = F.silu(x)
    scale = torch.rand(2, 8, 1, 1, requires_grad=True)
    _, saved = kept(lambda: ops.mul_act(a, scale, x, "silu", []))
    assert set(saved) == {x.untyped_storage().data_ptr(), scale.untyped_storage().data_ptr()}
    _, saved = kept(lambda: ops.mul_act(a, scale.detach(), x, "silu", []))
    assert x.untyped_storage().data_ptr() not in saved
    _, saved = kept(lambda: ops.mul_act(a.detach(), scale, x.detach(), "silu", []))
    assert set(saved) == {x.untyped_storage().data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mul_act_error(ops, dtype):
    torch.manual_seed(0)
    for shape, scale in SCALES[:4]:
        x, s, g = (torch.randn(t, dtype=torch.float64).to(dtype).double() for t in (shape, scale, shape))
        results = []
        for ours, t in ((True, dtype), (False, dtype), (False, torch.float64)):
            a, b = x.to(t).requires_grad_(), s.to(t).requires_grad_()
            out = ops.mul_act(F.silu(a), b, a, "silu", []) if ours else F.silu(a) * b
            results.append([out.detach(), *torch.autograd.grad(out, [a, b], g.to(t))])
        as_good(*results)


# --- With the convolution -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_conv_batch_norm_act(ops, train, recompute):
    # All of them, each alone, all but one, and none.
    combinations = sorted({tuple(k != i for i in range(5)) for k in range(6)} | {tuple(k == i for i in range(5)) for k in range(6)})
    for act, (layout, transposed) in itertools.product(["relu", "silu", "identity"], [(CONTIGUOUS, True), (LAST, False)]):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 9, 8, dtype=torch.float64).contiguous(memory_format=layout)
        cw, cb = torch.randn(4 if transposed else 6, 3 if transposed else 2, 3, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
        w, b, m, v = torch.rand(6).double() + 0.5, torch.randn(6).double(), torch.randn(6).double(), torch.rand(6).double() + 0.5
        conv = ([2, 1], [1, 1], [1, 1], transposed, [0, 0], 2)
        g = torch.randn(torch.convolution(x, cw, cb, *conv).shape, dtype=torch.float64)
        for needs in combinations:
            results = []
            for ours in (True, False):
                leaves = [t.clone(memory_format=torch.preserve_format).requires_grad_(n) for t, n in zip((x, cw, cb, w, b), needs)]
                rm, rv = m.clone(), v.clone()
                if ours:
                    out = ops.conv_batch_norm_act(*leaves[:3], *conv, *leaves[3:], rm, rv, train, 0.1, 1e-5, True, act, [], recompute)
                else:
                    out = ACTS[act][1](F.batch_norm(torch.convolution(*leaves[:3], *conv), rm, rv, *leaves[3:], train, 0.1, 1e-5))
                wanted = [t for t in leaves if t.requires_grad]
                results.append([out.detach(), rm, rv, *(torch.autograd.grad(out, wanted, g) if wanted else [])])
            same(*results)


def test_conv_batch_norm_act_keeps(ops):
    for train, recompute, frozen in itertools.product([True, False], repeat=3):
        x = torch.randn(2, 4, 8, 8, requires_grad=True) * 1
        cw, w = torch.randn(4, 4, 3, 3, requires_grad=not frozen), torch.ones(4, requires_grad=not frozen)
        m, v = torch.zeros(4), torch.ones(4)
        _, saved = kept(lambda: ops.conv_batch_norm_act(
            x, cw, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, w, None, m, v, train, 0.1, 1e-5, True, "relu", [], recompute))  # fmt: skip
        bytes_, own, weights = x.numel() * 4, x.untyped_storage().data_ptr(), {cw.untyped_storage().data_ptr()}
        needs_y = train or not frozen
        assert (own in saved) == (not frozen or (needs_y and recompute))
        rest = sum(size for ptr, size in saved.items() if ptr != own and ptr not in weights)
        assert rest <= 256 + (0 if not needs_y else 0 if recompute else bytes_) + (0 if needs_y else bytes_ // 32)


# --- Around the op --------------------------------------------------------------------------------------------------------------


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.conv(x)
        return torch.ops.tsmem.batch_norm_act(
            y, self.bn.weight, self.bn.bias, self.bn.running_mean, self.bn.running_var, self.training, 0.1, 1e-5, True, "relu", [])  # fmt: skip


def test_scripted_caller(ops):
    torch.manual_seed(0)
    eager = Scripted()
    scripted = torch.jit.script(eager)
    reference = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    reference[0].weight.data.copy_(eager.conv.weight.data)
    for call in range(4):
        for model in (scripted, reference):
            model.train(call != 2)
            model.zero_grad()
        x = torch.randn(4, 3, 9, 9)
        outs = [model(x) for model in (scripted, reference)]
        g = torch.randn_like(outs[0])
        for out in outs:
            out.backward(g)
        torch.testing.assert_close(outs[0], outs[1])
        for a, b in zip(scripted.parameters(), reference.parameters()):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(eager.bn.running_var, reference[1].running_var)
    with torch.no_grad():
        torch.testing.assert_close(scripted(x), reference(x))


def test_autocast(ops):
    x, cw = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)
    w, b = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        conv = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        ours = ops.conv_batch_norm_act(x, cw, None, *conv, w, b, None, None, True, 0.1, 1e-5, True, "relu", [], False)
        theirs = torch.relu(F.batch_norm(F.conv2d(x, cw, None, padding=1), None, None, w, b, True, 0.1, 1e-5))
        y = F.conv2d(x, cw, None, padding=1)
        normed = ops.batch_norm_act(y, w, b, None, None, True, 0.1, 1e-5, True, "relu", [])
    g = torch.randn(ours.shape)
    grads = [torch.autograd.grad(t, (x, cw, w, b), g.to(t.dtype)) for t in (ours, theirs, normed)]
    assert ours.dtype == theirs.dtype == normed.dtype == torch.bfloat16
    for result in (ours, normed):
        torch.testing.assert_close(result, theirs, rtol=2e-2, atol=2e-2)
    for other in (grads[0], grads[2]):
        for mine, pytorchs in zip(other, grads[1]):
            assert mine.dtype == pytorchs.dtype
            torch.testing.assert_close(mine, pytorchs, rtol=0, atol=0.03 * pytorchs.abs().max().item())


def test_threads_give_the_same(ops):
    x = torch.randn(8, 24, 40, 40, requires_grad=True)
    for layout, (name, f) in itertools.product([CONTIGUOUS, LAST], make_calls(ops).items()):
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            leaf = x.detach()[:, :4].contiguous(memory_format=layout).requires_grad_()
            out = f(leaf, torch.ones(4))
            results.append([out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]])
        torch.set_num_threads(2)
        same(*results, rtol=1e-4, atol=1e-5)


# Maps beyond the caches are written past them; wide rows are cut into tiles. Bounds allow for a few elements so close
# to relu's border that they fall on its other side.
LARGE = [((4, 64, 200, 256), CONTIGUOUS), ((4, 64, 200, 256), LAST), ((2, 2048, 51, 50), LAST), ((3, 1296, 41, 81), LAST), ((1, 1001, 83, 131), LAST)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape,layout", LARGE, ids=str)
def test_large_maps(ops, shape, layout, dtype):
    torch.manual_seed(0)
    x, z, g = ((torch.randn(shape) + i).to(dtype).contiguous(memory_format=layout) for i in (1, 0, 0))
    # In bfloat16 the rest would be the same kernels with more arithmetic.
    for act, train, add in [("relu", True, False), ("relu", False, True), ("silu", True, False)][: 1 if dtype == torch.bfloat16 else 3]:
        results = []
        for f, to, params in ((fused(ops, act, train, add), dtype, torch.float32), (pytorch(act, train, add), torch.float64, torch.float64)):
            leaf = x.to(to, copy=True).requires_grad_()
            w, b, m, v = (torch.linspace(*ends, shape[1], dtype=params) for ends in ((0.5, 1.5), (-1, 1), (0, 1), (1, 2)))
            out = f(leaf, w.requires_grad_(), b.requires_grad_(), m, v, z.to(to))
            results.append([t.double() for t in (out.detach(), *torch.autograd.grad(out, (leaf, w, b), g.to(to)), m, v)])
        for ours, exact in zip(*results):
            if ours.dim() == 1:
                assert (ours - exact).norm() < 1e-2 * exact.norm(), (act, train)
                continue
            # None is missing or misplaced.
            wrong = (ours - exact).abs() > (1e-4 if dtype == torch.float32 else 2e-2) * (1 + exact.abs())
            assert wrong.sum() <= 1e-5 * wrong.numel(), (act, train, wrong.sum())


VARIANT = """
import sys, torch
sys.path.insert(0, {tests!r})
import conftest
ops = conftest.load()
torch.manual_seed(0)
results = []
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for layout in (torch.contiguous_format, torch.channels_last):
        for act in ("relu", "silu", "gelu", "mish"):
            x = (torch.randn(3, 7, 11, 37, dtype=torch.float64) + 1).to(dtype).contiguous(memory_format=layout).requires_grad_()
            z = torch.randn(3, 7, 11, 37, dtype=torch.float64).to(dtype).contiguous(memory_format=layout)
            out = ops.batch_norm_add_act(x, None, None, None, None, True, 0.1, 1e-5, True, z, act, [])
            pool = ops.batch_norm_act_max_pool2d(x, None, None, None, None, True, .1, 1e-5, True, act, [], [3], [2], [1], [1], False)
            loss = (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)).sum() + pool.double().sum()
            results += [out.detach().double(), torch.autograd.grad(loss, x)[0].double()]
torch.save(results, sys.argv[1])
"""


def test_instruction_sets_agree(ops, tmp_path):
    tests = str(pathlib.Path(__file__).resolve().parents[1])
    results = {}
    for isa in ("baseline", "avx2", "avx512"):
        path = tmp_path / isa
        subprocess.run([sys.executable, "-c", VARIANT.format(tests=tests), str(path)], check=True, env={**os.environ, "TSMEM_ISA": isa})
        results[isa] = torch.load(path)
    for isa in ("avx2", "avx512"):
        for i, (a, b) in enumerate(zip(results[isa], results["baseline"])):
            half = i // 16 in (1, 2)
            torch.testing.assert_close(a, b, rtol=2e-2 if half else 1e-5, atol=2e-2 if half else 1e-6)


def test_strides_of_tensors_that_are_contiguous_and_channels_last(ops):
    """One channel, or one pixel: PyTorch's norms give what is contiguous, ours too."""
    silu = torch.nn.functional.silu
    for shape in ((2, 1, 4, 4), (1, 1, 5, 1), (2, 4, 1, 1), (2, 1, 1, 6), (2, 4, 1, 6), (2, 1, 2, 3, 4), (2, 4, 1, 1, 1)):
        channels = shape[1]
        last = torch.empty(shape).to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d).stride()
        explicit = tuple([channels * math.prod(shape[2:]), 1] + [channels * math.prod(shape[d + 1 :]) for d in range(2, len(shape))])
        for strides in {torch.empty(shape).stride(), last, explicit}:
            x = torch.empty_strided(shape, strides).normal_()
            for training in (True, False):
                bn = (None, None, torch.zeros(channels), torch.ones(channels), training, 0.1, 1e-5, True)
                norm = torch.ops.aten.batch_norm(x, *bn)
                for ours, pytorch in (
                    (ops.batch_norm_act(x, *bn, "silu", []), silu(norm)),
                    (ops.batch_norm_add_act(x, *bn, x, "silu", []), silu(norm + x)),
                ):
                    assert ours.stride() == pytorch.stride(), (shape, strides)
                    torch.testing.assert_close(ours, pytorch)


@pytest.mark.parametrize("layout", [CONTIGUOUS, LAST])
def test_a_gradient_of_one_image_with_any_stride_between_images(ops, layout):
    """PyTorch's own batch norm misreads it where the input is contiguous: the reference has a copy of it."""
    values = torch.randn(1, 8, 4, 4, dtype=torch.float64)
    x = torch.randn(1, 8, 4, 4, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    weight, bias = torch.rand(8, dtype=torch.float64).requires_grad_(), torch.randn(8, dtype=torch.float64).requires_grad_()
    (expected, *others) = torch.autograd.grad(F.batch_norm(x, None, None, weight, bias, True), (x, weight, bias), values.to(memory_format=layout))
    for held in (True, False):
        seen = []
        y = ops.batch_norm_act(x, weight, bias, None, None, True, 0.1, 1e-5, True, "identity", [])
        if held:
            y.register_hook(lambda grad: seen.append(grad.stride()))
        areas = y.flatten(2).transpose(1, 2).reshape(4, 4, 8)
        (got, *more) = torch.autograd.grad((areas * values.flatten(2).transpose(1, 2).reshape(4, 4, 8).contiguous()).sum(), (x, weight, bias))
        assert seen == [(8, 1, 32, 8)][:held]
        torch.testing.assert_close([got, *more], [expected, *others], rtol=1e-12, atol=1e-12)
        # PyTorch's own, in the layer before, would misread the strides that this gradient has.
        assert got.stride() == x.stride()
