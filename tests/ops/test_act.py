"""tsmem::act against PyTorch's activations."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, assert_equal, calls, channels_last, hardsigmoid, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")
A = torch.ops.aten

ONE_BIT = {
    "relu": ([], A.relu),
    "hardtanh": ([-0.1, 0.2], lambda x: A.hardtanh(x, -0.1, 0.2)),
    "threshold": ([0.1, 0.3], lambda x: A.threshold(x, 0.1, 0.3)),
    "leaky_relu": ([0.1], lambda x: A.leaky_relu(x, 0.1)),
    "hardsigmoid": ([], hardsigmoid),
    "hardsigmoid_eager": ([], A.hardsigmoid),
}
ONE_TENSOR = {
    "silu": ([], A.silu), "hardswish": ([], A.hardswish), "gelu": ([], A.gelu),
    "gelu_tanh": ([], lambda x: A.gelu(x, approximate="tanh")), "sigmoid": ([], A.sigmoid), "tanh": ([], A.tanh),
    "elu": ([1.5, 1.0, 1.0], lambda x: A.elu(x, 1.5)), "softplus": ([2.0, 20.0], lambda x: A.softplus(x, 2, 20)), "mish": ([], A.mish),
}
ALL = ONE_BIT | ONE_TENSOR


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("alpha", (0.7, 0.5, 1.0, 1.3))
def test_celu_has_one_alpha_in_forward_and_another_in_backward(ops, dtype, alpha):
    """PyTorch's gradient rounds it to float32."""
    x = torch.linspace(-6, 3, 1000, dtype=dtype, requires_grad=True)
    for a, b in zip(run(lambda x: ops.act(x, "elu", [alpha, 1.0, 1 / alpha]), x), run(lambda x: F.celu(x, alpha), x)):
        torch.testing.assert_close(a, b, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)


def ours(name):
    return lambda x: torch.ops.tsmem.act(x, name, ALL[name][0])


def layouts(shape, dtype):
    x = torch.randn(shape, dtype=torch.float64).mul(4).to(dtype)
    yield x
    yield channels_last(x) if x.dim() > 2 else x.t()
    yield x.transpose(0, -1)
    yield x[..., ::2]
    if x.shape[0]:
        yield x[:1].expand(3, *x.shape[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_equals_pytorch(name, dtype):
    for shape in ((3, 5), (2, 3, 9), (2, 3, 9, 7), (2, 3, 5, 6, 7), (3, 40, 31, 30), (0, 3, 4)):
        for x in layouts(shape, dtype):
            x.requires_grad_()
            assert_equal(run(ours(name), x), run(ALL[name][1], x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE_TENSOR)
def test_recomputed_as_exact_as_pytorch(name, dtype):
    """Where the output may be recomputed some have kernels of ours: not PyTorch's bits, and no further from the truth."""
    args, pytorch = ONE_TENSOR[name]

    def again(x):
        return torch.ops.tsmem.act(x, name, args, 1)

    for shape in ((3, 5), (2, 3, 9, 7), (3, 40, 31, 30), (0, 3, 4)):
        for x in layouts(shape, dtype):
            x.requires_grad_()
            cotangent = torch.randn(x.shape, dtype=torch.float64).to(dtype)
            results = [run(f, t, cotangent=cotangent.to(t.dtype)) for f, t in ((again, x), (pytorch, x), (pytorch, x.double()))]
            with torch.no_grad():
                assert torch.equal(again(x), results[0][0])
            for ours_, pytorchs, exact in zip(*results):
                assert ours_.dtype == dtype and ours_.stride() == pytorchs.stride()
                if not x.numel():
                    continue
                error, allowed = ((t.double() - exact).abs().max() for t in (ours_, pytorchs))
                assert error <= 2 * allowed + 2 * torch.finfo(dtype).eps * exact.abs().max()
    borders = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, 100.0, -100.0, 1e4, -1e4], dtype=dtype)
    x = borders.repeat_interleave(64).requires_grad_()
    for a, e in zip(run(again, x), run(pytorch, x)):
        # PyTorch's vector code and its scalar one differ at NaN for elu, ours is as the scalar. The derivative of mish at
        # infinity is 1, and NaN in PyTorch.
        odd = x.isnan() if name == "elu" else x.isinf() if name == "mish" else torch.zeros_like(x, dtype=torch.bool)
        a, e = (torch.where(odd, 0, t) for t in (a, e))
        torch.testing.assert_close(a, e, equal_nan=True)


@pytest.mark.parametrize("name", ONE_BIT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_borders(name, dtype):
    args = ONE_BIT[name][0]
    borders = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, 3.0, -3.0, 6.0, *args, *(-a for a in args)]
    # Sixteen of each: PyTorch's vectorised code. Its scalar tail lets a NaN's gradient through hardtanh, its vectors do not.
    x = torch.tensor(borders, dtype=dtype).repeat_interleave(64).requires_grad_()
    actual, expected = run(ours(name), x), run(ONE_BIT[name][1], x)
    assert_equal(actual, expected)
    finite = ~x.isnan()
    assert torch.equal(torch.signbit(actual[0])[finite], torch.signbit(expected[0])[finite])
    g = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0] * 16, dtype=dtype).repeat(len(borders))
    assert_equal(run(ours(name), x, cotangent=g), run(ONE_BIT[name][1], x, cotangent=g))


@pytest.mark.parametrize("name", ONE_BIT)
def test_strided_gradient(name):
    x = torch.randn(4, 6, 5, 7).requires_grad_()
    for g in (channels_last(torch.randn(x.shape)), torch.randn(4, 6, 5, 14)[..., ::2], torch.randn(1, 1, 1, 1).expand(x.shape)):
        assert_equal(run(ours(name), x, cotangent=g), run(ONE_BIT[name][1], x, cotangent=g))


@pytest.mark.parametrize("name", ALL)
def test_gradcheck(name):
    x = torch.randn(3, 5, dtype=torch.float64).mul(2).requires_grad_()
    assert torch.autograd.gradcheck(ours(name), x)
    assert torch.autograd.gradgradcheck(ours(name), x)


@pytest.mark.parametrize("name", ONE_BIT)
def test_keeps_one_bit(name):
    for n in (1000, 1001):
        x = torch.randn(2, n, requires_grad=True)
        kept, y = saved(lambda: ours(name)(x * 1))
        assert [k.numel() for k in kept if k.dtype == torch.uint8] == [(y.numel() + 7) // 8] and len(kept) == 1
    big = torch.randn(1 << 20, requires_grad=True)
    assert live_bytes(lambda: ours(name)(big)) <= big.numel() // 8 + 4096


@pytest.mark.parametrize("name", ONE_TENSOR)
def test_keeps_one_tensor(name):
    x = torch.randn(2, 1000, requires_grad=True)
    kept, y = saved(lambda: ours(name)(x))
    assert [k.shape for k in kept] == [x.shape]
    assert kept[0].data_ptr() == (y if name in ("sigmoid", "tanh") else x).data_ptr()


@pytest.mark.parametrize("name", ALL)
def test_keeps_nothing_without_grad(name):
    assert saved(lambda: ours(name)(torch.randn(8)))[0] == []
    with torch.no_grad():
        assert saved(lambda: ours(name)(torch.randn(8, requires_grad=True)))[0] == []


@pytest.mark.parametrize("name", ALL)
def test_meta_fake_autocast(name):
    from torch._subclasses.fake_tensor import FakeTensorMode
    x = torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    meta = x.to("meta").requires_grad_()
    y = ours(name)(meta)
    y.sum().backward()
    assert y.is_meta and y.stride() == ALL[name][1](x).stride() and meta.grad.shape == x.shape
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x).requires_grad_()
        assert ours(name)(fake).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in DTYPES:
            assert_equal(run(ours(name), x.to(dtype).requires_grad_()), run(ALL[name][1], x.to(dtype).requires_grad_()))


@pytest.mark.parametrize("name", ONE_BIT)
def test_other_inputs_take_pytorch(name):
    x, t = torch.randn(4, 6), torch.randn(4, 6)
    actual, expected = torch.func.jvp(ours(name), (x,), (t,)), torch.func.jvp(ONE_BIT[name][1], (x,), (t,))
    assert_equal(list(actual), list(expected))
    assert_equal([torch.func.grad(lambda z: ours(name)(z).sum())(x)], [torch.func.grad(lambda z: ONE_BIT[name][1](z).sum())(x)])
    assert_equal([torch.vmap(ours(name))(x)], [torch.vmap(ONE_BIT[name][1])(x)])


def test_scripted_and_retained():
    @torch.jit.script
    def f(x):
        return torch.ops.tsmem.act(x * 2.0, "relu", []) * x

    x = torch.randn(3, 33, requires_grad=True)
    for result in calls(f, x):
        assert_equal(result, run(lambda z: torch.relu(z * 2.0) * z, x))
    y = ours("relu")(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, 2.0 * (x > 0))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="no activation is named 'rleu'"):
        torch.ops.tsmem.act(torch.randn(3), "rleu", [])
    with pytest.raises(ValueError, match="'hardtanh' takes 2 arguments, not 1"):
        torch.ops.tsmem.act(torch.randn(3), "hardtanh", [1.0])


def sizes_of_one(dtype):
    """Dense tensors whose strides, where a dimension has one element, are not a new tensor's."""
    for sizes, strides in (((2, 4, 1, 1), (4, 1, 4, 4)), ((2, 4, 2, 1), (8, 1, 4, 4)), ((2, 1, 2, 2), (4, 1, 2, 1)), ((2, 4, 1), (4, 1, 17)),
                           ((4, 1, 2), (1, 99, 4)), ((1, 4, 3, 3), (99, 1, 12, 4)), ((2, 4, 1, 1, 1), (4, 1, 4, 4, 4))):
        yield torch.randn(36).mul(4).to(dtype).as_strided(sizes, strides)


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_strides_of_sizes_of_one(name, grad, recompute):
    """A new result's are those of a new tensor, an in-place operator leaves its argument's alone: what picks a layout by them goes on as in PyTorch."""
    args, pytorch = ALL[name]
    for x in sizes_of_one(torch.float32):
        x.requires_grad_(grad)
        assert torch.ops.tsmem.act(x, name, args, recompute).stride() == pytorch(x).stride()
        if name == "identity":
            continue
        assert torch.ops.tsmem.act(x, name, args, recompute, True).stride() == x.stride()
        if grad:
            pairs = [torch.autograd.grad(f(x), x, torch.ones(x.shape))[0] for f in (ours(name), pytorch)]
            torch.testing.assert_close(*pairs)


KEPT_BY_OTHERS = {"relu": [], "leaky_relu": [0.1]}


def between_convolutions(name, args, recompute=0, in_place=True):
    """act(x * 1) before a convolution of ours. In place PyTorch's keep the output, and so is relu's in any case."""
    return lambda x, w: torch.ops.tsmem.conv2d(torch.ops.tsmem.act(x * 1.0, name, args, recompute, in_place), w)


def pytorch_between_convolutions(name, args):
    return lambda x, w: F.conv2d(getattr(A, name)(x * 1.0, *args), w)


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("name", KEPT_BY_OTHERS)
def test_output_that_others_keep_takes_the_place_of_the_bits(name, recompute):
    f = between_convolutions(name, KEPT_BY_OTHERS[name], recompute)
    x, w = torch.randn(1, 8, 128, 128, requires_grad=True), torch.randn(2, 8, 1, 1)
    assert live_bytes(lambda: f(x, w)) <= x.numel() // 8 + 8192  # the frozen convolution keeps no input
    w.requires_grad_()
    assert 4 * x.numel() <= live_bytes(lambda: f(x, w)) <= 4 * x.numel() + 8192


@pytest.mark.parametrize("name,args,in_place", [("hardtanh", [0.0, 6.0], True), ("hardtanh", [0.0, 6.0], False), ("leaky_relu", [0.1], False)])
def test_what_pytorch_does_not_keep_may_be_overwritten(name, args, in_place):
    """They keep the input, hardtanh in place a copy: the output may be written to where its other user is not differentiated."""
    f = between_convolutions(name, args, 0, in_place)
    x, w = torch.randn(1, 8, 64, 64, requires_grad=True), torch.randn(2, 8, 1, 1, requires_grad=True)
    assert live_bytes(lambda: f(x, w)) >= (4 + 1 / 8) * x.numel()
    gradients = []
    pytorch = getattr(A, name + "_" * in_place)
    for act in (lambda t: torch.ops.tsmem.act(t, name, args, 0, in_place), lambda t: pytorch(t, *args)):
        y = act(x * 1.0)
        z = torch.ops.tsmem.conv2d(y, w).detach()
        y[:, 0] = 0
        gradients.append(torch.autograd.grad((y * 1).sum() + z.sum(), x)[0])
    assert torch.equal(*gradients)


def test_gradients_within_a_checkpoint():
    """Its second forward runs while the activation's backward asks for what it has saved, and has a backward of its own."""
    w = torch.randn(4, 4, 1, 1, requires_grad=True)

    def f(act, x):
        y = act(torch.ops.tsmem.conv2d(x, w))
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return act(g + x)

    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    results = []
    for act in (ours("relu"), torch.relu):
        z = torch.utils.checkpoint.checkpoint(f, act, x * 1.0, use_reentrant=False)
        results.append(torch.autograd.grad(z.sum(), [x, w], allow_unused=True))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KEPT_BY_OTHERS)
def test_gradient_from_the_output(name, dtype):
    args = KEPT_BY_OTHERS[name]
    for layout in (lambda t: t, channels_last):
        x = layout(torch.randn(2, 4, 9, 7).mul(4).to(dtype))
        special = torch.tensor([0.0, -0.0, 6.0, float("nan"), float("inf"), -float("inf"), 1e-7, -1e-7]).to(dtype)
        x[0, 0, 0, :7], x[0, 0, 1, :1] = special[:7], special[7:]
        x.requires_grad_()
        w = torch.randn(3, 4, 1, 1, dtype=dtype, requires_grad=True)
        actual, expected = (run(g(name, args), x, w) for g in (between_convolutions, pytorch_between_convolutions))
        assert_equal(actual[:2], expected[:2])


@pytest.mark.parametrize("name", KEPT_BY_OTHERS)
def test_gradcheck_from_the_output(name):
    x, w = torch.randn(1, 2, 3, 3, dtype=torch.float64).mul(2).requires_grad_(), torch.randn(2, 2, 1, 1, dtype=torch.float64, requires_grad=True)
    f = between_convolutions(name, KEPT_BY_OTHERS[name])
    assert torch.autograd.gradcheck(f, (x, w))
    assert torch.autograd.gradgradcheck(f, (x, w))


def test_kept_output_that_is_written_to():
    """Backward says so, as PyTorch's relu would; where nobody keeps the output it may be overwritten."""
    x, w = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(2, 2, 1, 1, requires_grad=True)
    y = ours("relu")(x * 1.0)
    z = torch.ops.tsmem.conv2d(y, w)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    y = ours("relu")(x * 1.0)
    with torch.no_grad():
        y.mul_(2)
    z = torch.ops.tsmem.conv2d(y, w)  # keeps what is not relu's output any more
    assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 1.0 * (x > 0))
    assert z.requires_grad


def test_kept_output_of_a_freed_or_retained_graph():
    x, w = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(2, 2, 1, 1, requires_grad=True)
    y = ours("relu")(x * 1.0)
    z = torch.ops.tsmem.conv2d(y, w)
    first = torch.autograd.grad(z.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    # A head that comes after the other's backward.
    y = ours("relu")(x * 1.0)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(torch.ops.tsmem.conv2d(y, w).sum(), x)[0], first)


def test_outputs_kept_in_threads():
    """Heads on one trunk, some in their backward while others keep the trunk's output."""
    x, w = torch.randn(1, 4, 16, 16, requires_grad=True), torch.randn(2, 4, 1, 1, requires_grad=True)
    for _ in range(20):
        y = ours("relu")(x * 1.0)

        def head(y=y):
            z = torch.ops.tsmem.conv2d(y, w)
            return torch.autograd.grad(z.sum(), x, retain_graph=True)[0]

        with ThreadPoolExecutor(4) as pool:
            results = [r.result() for r in [pool.submit(head) for _ in range(8)]]
        assert all(torch.equal(r, results[0]) for r in results)
