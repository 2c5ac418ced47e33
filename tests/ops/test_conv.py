"""The convolutions against aten's: bit for bit, and what they keep."""

import itertools

import pytest
import torch
from op_checks import DTYPES, assert_equal, calls, channels_last, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")

FLAGS = [f for f in itertools.product((False, True), repeat=3) if any(f)]
CONVS = {f"conv{d}d": d for d in (1, 2, 3)}
TRANSPOSED = {f"conv_transpose{d}d": d for d in (1, 2, 3)}


def overload(namespace, name, string=False):
    op = getattr(namespace, name)
    return op.padding if string else op.input if name in ("conv_transpose2d", "conv_transpose3d") else op.default


def pair(name, **kwargs):
    string = isinstance(kwargs.get("padding"), str)

    def make(namespace):
        return lambda *inputs: overload(namespace, name, string)(*inputs, **kwargs)

    return make(torch.ops.tsmem), make(torch.ops.aten)


def operands(d, groups=2, dtype=torch.float32, transposed=False, flags=(True, True, True)):
    x = torch.randn([2, 4] + [7, 6, 5][:d])
    w = torch.randn(([4, 3] if transposed else [6, 4 // groups]) + [3, 2, 3][:d])
    b = torch.randn(3 * groups if transposed else 6)
    return [t.to(dtype).requires_grad_(f) for t, f in zip((x, w, b), flags)]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", CONVS)
def test_equals_pytorch(name, flags):
    d = CONVS[name]
    inputs = operands(d, flags=flags)
    for kwargs in ({}, dict(stride=[2] * d, padding=[1] * d), dict(dilation=[2] * d, padding=[2] * d)):
        ours, pytorch = pair(name, groups=2, **kwargs)
        for layouts in itertools.product((lambda x: x, channels_last), repeat=2):
            x, w = (f(t.detach()).requires_grad_(t.requires_grad) for f, t in zip(layouts, inputs))
            assert_equal(run(ours, x, w, inputs[2]), run(pytorch, x, w, inputs[2]))
    for padding in ("same", "valid"):
        ours, pytorch = pair(name, padding=padding, groups=2)
        assert_equal(run(ours, *inputs), run(pytorch, *inputs))
        x = inputs[0][0].detach().requires_grad_(flags[0])  # unbatched
        assert_equal(run(ours, x, *inputs[1:]), run(pytorch, x, *inputs[1:]))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_equals_pytorch(name, flags):
    d = TRANSPOSED[name]
    x, w, b = operands(d, transposed=True, flags=flags)
    for kwargs in ({}, dict(stride=[2] * d, padding=[1] * d, output_padding=[1] * d), dict(dilation=[2] * d)):
        ours, pytorch = pair(name, groups=2, **kwargs)
        assert_equal(run(ours, x, w, b), run(pytorch, x, w, b))
        z = channels_last(x.detach()).requires_grad_(flags[0])
        assert_equal(run(ours, z, w, b), run(pytorch, z, w, b))
        z = x[0].detach().requires_grad_(flags[0])
        assert_equal(run(ours, z, w, b), run(pytorch, z, w, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes(dtype):
    ours, pytorch = pair("conv2d", padding=[1, 1])
    for shape, out in (((1, 3, 5, 5), 4), ((0, 3, 5, 5), 4), ((2, 3, 1, 9), 1), ((2, 1, 8, 8), 3)):
        x = torch.randn(shape).to(dtype).requires_grad_()
        w = torch.randn(out, shape[1], 3, 3).to(dtype).requires_grad_()
        assert_equal(run(ours, x, w), run(pytorch, x, w))
    strided = torch.randn(2, 3, 9, 18).to(dtype)[..., ::2].requires_grad_()
    w = torch.randn(4, 3, 3, 3).to(dtype).requires_grad_()
    y, *_ = run(pytorch, strided, w)
    for g in (torch.randn(*y.shape[:3], 2 * y.shape[3]).to(dtype)[..., ::2], torch.ones(1, dtype=dtype).expand(y.shape)):
        assert_equal(run(ours, strided, w, cotangent=g), run(pytorch, strided, w, cotangent=g))


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("deprecated", (False, True))
def test_convolution(transposed, deprecated):
    flags = [False, False, True] if deprecated else [False, False, True, True]
    args = ([2, 2], [1, 1], [1, 1], transposed, [1, 1] if transposed else [0, 0], 2, *flags)
    which = "deprecated" if deprecated else "default"
    for needs in FLAGS:
        inputs = operands(2, transposed=transposed, flags=needs)
        for dtype in (torch.float32, torch.float64):
            z = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in inputs]
            assert_equal(run(lambda *i: getattr(torch.ops.tsmem._convolution, which)(*i, *args), *z),
                         run(lambda *i: getattr(torch.ops.aten._convolution, which)(*i, *args), *z))


@pytest.mark.parametrize("d", (1, 2, 3))
def test_convolution_of_a_traced_padding(d):
    """Also where it falls back: one sample, as PyTorch takes it or not, and a padding that there is not."""
    for padding, stride in (("same", 1), ("valid", 2)):
        args = ([stride] * d, padding, [1] * d, 2)
        for needs in FLAGS:
            x, w, b = operands(d, flags=needs)
            for dtype in (torch.float32, torch.float64):
                z = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (x, w, b)]
                assert_equal(run(lambda *i: torch.ops.tsmem._convolution_mode(*i, *args), *z), run(lambda *i: torch.ops.aten._convolution_mode(*i, *args), *z))
    for bad in ((x, ([1] * d, "some", [1] * d, 2)), (x[0], ([1] * d, "same", [1] * d, 2))):
        outcomes = []
        for op in (torch.ops.tsmem._convolution_mode, torch.ops.aten._convolution_mode):
            try:
                outcomes.append(op(bad[0], w, b, *bad[1]).shape)
            except (RuntimeError, IndexError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], outcomes
    with torch.autocast("cpu", torch.bfloat16):
        x, w, b = operands(d)
        args = ([1] * d, "same", [1] * d, 2)
        assert_equal(run(lambda *i: torch.ops.tsmem._convolution_mode(*i, *args), x, w, b), run(lambda *i: torch.ops.aten._convolution_mode(*i, *args), x, w, b))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", CONVS | TRANSPOSED)
def test_keeps_only_what_is_needed(name, flags):
    d = (CONVS | TRANSPOSED)[name]
    x, w, b = operands(d, transposed=name in TRANSPOSED, flags=flags)
    kept, _ = saved(lambda: pair(name, groups=2)[0](x, w, b))
    expected = {t.data_ptr() for t, keep in ((x, flags[1]), (w, flags[0])) if keep}
    assert {t.data_ptr() for t in kept} == expected
    with torch.no_grad():
        assert saved(lambda: pair(name, groups=2)[0](x, w, b))[0] == []


def test_asymmetric_same_keeps_the_input_itself():
    x, w = torch.randn(2, 3, 64, 64, requires_grad=True), torch.randn(4, 3, 2, 2, requires_grad=True)
    kept, _ = saved(lambda: torch.ops.tsmem.conv2d.padding(x, w, padding="same"))
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), w.data_ptr()}


def test_frozen_weight_keeps_no_bytes():
    w = torch.randn(8, 8, 3, 3)
    x = torch.randn(4, 8, 64, 64, requires_grad=True)
    assert live_bytes(lambda: torch.ops.tsmem.conv2d(x * 2, w)) < x.numel()
    assert live_bytes(lambda: torch.ops.aten.conv2d(x * 2, w)) >= 4 * x.numel()


@pytest.mark.parametrize("name", CONVS | TRANSPOSED)
def test_gradcheck(name):
    d = (CONVS | TRANSPOSED)[name]
    for flags in FLAGS:
        inputs = operands(d, dtype=torch.float64, transposed=name in TRANSPOSED, flags=flags)
        ours = pair(name, groups=2)[0]
        assert torch.autograd.gradcheck(ours, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(ours, inputs, fast_mode=True)
    if name in CONVS:
        inputs = operands(d, dtype=torch.float64)
        same = pair(name, padding="same", groups=2)[0]
        assert torch.autograd.gradcheck(same, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(same, inputs, fast_mode=True)


@pytest.mark.parametrize("name", CONVS | TRANSPOSED)
def test_autocast(name):
    d = (CONVS | TRANSPOSED)[name]
    for dtype in (torch.bfloat16, torch.float16):
        for x_dtype in (torch.float32, dtype):
            x, w, b = operands(d, transposed=name in TRANSPOSED)
            x = x.detach().to(x_dtype).requires_grad_()
            with torch.autocast("cpu", dtype):
                ours, pytorch = pair(name, groups=2)
                assert_equal(run(ours, x, w, b), run(pytorch, x, w, b))
                if name in CONVS:
                    ours, pytorch = pair(name, padding="same", groups=2)
                    assert_equal(run(ours, x, w, b), run(pytorch, x, w, b))


def test_autocast_convolution():
    args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2, False, False, True)
    inputs = operands(2)
    with torch.autocast("cpu", torch.bfloat16):
        for which, rest in (("deprecated", ()), ("default", (True,))):
            assert_equal(run(lambda *i: getattr(torch.ops.tsmem._convolution, which)(*i, *args, *rest), *inputs),
                         run(lambda *i: getattr(torch.ops.aten._convolution, which)(*i, *args, *rest), *inputs))


def test_autocast_shares_the_cast_of_a_weight_that_is_used_again():
    """The first use's is let go: no cache holds it for others."""
    x, w = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        first = torch.ops.tsmem.conv2d(x, w)
        kept, _ = saved(lambda: (torch.ops.tsmem.conv2d(x, w), torch.ops.aten.conv2d(x, w)))
    assert first.dtype == torch.bfloat16
    assert len([t for t in kept if t.shape == w.shape and t.dtype == torch.bfloat16]) == 1


@pytest.mark.parametrize("name", CONVS | TRANSPOSED)
def test_meta_and_fake(name):
    from torch._subclasses.fake_tensor import FakeTensorMode
    d = (CONVS | TRANSPOSED)[name]
    ours, pytorch = pair(name, groups=2)
    for flags in FLAGS:
        inputs = operands(d, transposed=name in TRANSPOSED, flags=flags)
        expected = run(pytorch, *inputs)
        meta = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in inputs]
        actual = run(ours, *meta, cotangent=torch.empty_like(expected[0], device="meta"))
        assert [a.shape for a in actual] == [e.shape for e in expected]
        plain = [t.detach() for t in inputs]
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t).requires_grad_(f) for t, f in zip(plain, flags)]
            y = ours(*fake)
            y.sum().backward()
            assert all(t.grad is None or t.grad.shape == t.shape for t in fake)


def test_changed_weight_is_an_error():
    x, w = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    for changed in (x, w):
        y = torch.ops.tsmem.conv2d(x, w)
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_errors_are_pytorchs():
    w = torch.randn(4, 3, 3, 3, requires_grad=True)
    cases = [((torch.randn(2, 5, 8, 8), w), {}), ((torch.randn(8, 8), w), {}), ((torch.randn(2, 3, 2, 2), w), {}),
             ((torch.randn(2, 3, 8, 8).double(), w), {}), ((torch.randn(2, 3, 8, 8), w, torch.randn(3)), {}),
             ((torch.randn(2, 3, 8, 8), w), {"groups": 2}), ((torch.randn(2, 3, 8, 8), w), {"stride": [0, 1]}),
             ((torch.randn(2, 3, 8, 8), w), {"stride": [1, 1, 1]}), ((torch.randn(2, 3, 8), w), {"padding": [-1, 0]})]
    for args, kwargs in cases:
        with pytest.raises(RuntimeError) as expected:
            torch.ops.aten.conv2d(*args, **kwargs)
        with pytest.raises(RuntimeError) as actual:
            torch.ops.tsmem.conv2d(*args, **kwargs)
        assert str(actual.value).splitlines()[0] == str(expected.value).splitlines()[0]
    with pytest.raises(RuntimeError, match="not supported for strided convolutions"):
        torch.ops.tsmem.conv2d.padding(torch.randn(2, 3, 8, 8), w, stride=[2, 2], padding="same")
    with pytest.raises(RuntimeError, match="Invalid padding string"):
        torch.ops.tsmem.conv2d.padding(torch.randn(2, 3, 8, 8), w, padding="sane")


def test_other_inputs_take_pytorch():
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    ours, pytorch = pair("conv2d")
    assert_equal(list(torch.func.jvp(ours, (x, w), (x, w))), list(torch.func.jvp(pytorch, (x, w), (x, w))))
    assert_equal([torch.func.grad(lambda z: ours(z, w).sum())(x)], [torch.func.grad(lambda z: pytorch(z, w).sum())(x)])
    torch.testing.assert_close(torch.vmap(ours, (0, None))(x, w), torch.vmap(pytorch, (0, None))(x, w))
    c = torch.randn(2, 3, 8, 8, dtype=torch.complex64, requires_grad=True)
    assert_equal(run(ours, c, w.to(c.dtype)), run(pytorch, c, w.to(c.dtype)))


def test_scripted_and_partial_gradients():
    @torch.jit.script
    def f(x, w):
        return torch.relu(torch.ops.tsmem.conv2d(x * 2.0, w, None, [1, 1], [1, 1]))

    x, w = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    expected = run(lambda a, b: torch.relu(torch.conv2d(a * 2.0, b, None, 1, 1)), x, w)
    for _ in range(4):
        assert_equal(run(f, x, w), expected)
    w.requires_grad_(False)  # frozen after the calls: the same scripted function decides anew
    kept, _ = saved(lambda: f(x, w))
    assert all(k.shape != x.shape for k in kept)
    w.requires_grad_(True)
    y = torch.ops.tsmem.conv2d(x, w)
    (only,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    both = torch.autograd.grad(y.sum(), (x, w))
    assert torch.equal(only, both[0])


# Large ones, which run by parts of the batch.


class Layer(torch.nn.Module):
    """One op, with parameters that allocator.memory() finds."""

    def __init__(self, op, w, b, args):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(w), None if b is None else torch.nn.Parameter(b)
        self.op, self.args = op, args

    def forward(self, x):
        return self.op(x, self.w, self.b, *self.args)


def ran(f):
    """f(), and how many convolutions and backward convolutions ran in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        result = f()
    names = [e.name for e in profile.events()]
    return result, names.count("aten::convolution"), names.count("aten::convolution_backward")


LARGE = {  # op, weight, arguments, input without its batch
    "conv2d": ("conv2d", (32, 16, 3, 3), ([1, 1], [1, 1]), (16, 128, 130)),
    "strided, of groups": ("conv2d", (32, 16, 3, 3), ([2, 1], [1, 1], [1, 1], 2), (32, 160, 130)),
    "conv1d": ("conv1d", (32, 16, 5), ([1], [2]), (16, 16384)),
    "conv3d": ("conv3d", (16, 16, 1, 3, 3), ([1, 1, 1], [0, 1, 1]), (16, 12, 44, 48)),
    "transposed": ("conv_transpose2d", (32, 16, 2, 2), ([2, 2],), (32, 64, 66)),
    "transposed, of groups": ("conv_transpose2d", (32, 8, 3, 3), ([2, 2], [1, 1], [1, 1], 2), (32, 64, 66)),
}


def layers(name, dtype=torch.float32, bias=True):
    """Ours, PyTorch, and an input just over the limit of 16 MiB."""
    op, weight, args, shape = LARGE[name]
    w = torch.randn(weight, dtype=dtype) / 8
    groups = args[3] if len(args) > 3 else 1
    b = torch.randn(groups * weight[1] if op.startswith("conv_transpose") else weight[0], dtype=dtype) if bias else None
    ours, pytorch = (Layer(overload(o, op), w, b, args) for o in (torch.ops.tsmem, torch.ops.aten))
    one = torch.randn(1, *shape, dtype=dtype)
    with torch.no_grad():
        each = one.nbytes + pytorch(one).nbytes
    batch = -(-(16 << 20) // each)
    return ours, pytorch, torch.randn(batch, *shape, dtype=dtype, requires_grad=True)


def compare(ours, pytorch, x, cotangent=None):
    y, z = ours(x), pytorch(x)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4}[x.dtype]
    torch.testing.assert_close(y, z, rtol=tolerance / 10, atol=tolerance / 10)
    g = torch.randn_like(z) if cotangent is None else cotangent(z)
    inputs = [x] * x.requires_grad
    found = torch.autograd.grad(y, [*inputs, *ours.parameters()], g)
    for a, e in zip(found, torch.autograd.grad(z, [*inputs, *pytorch.parameters()], g)):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * float(e.abs().max()))
    return found


@pytest.mark.parametrize("dtype,bias", ((torch.float32, True), (torch.float64, False)))
@pytest.mark.parametrize("name", LARGE)
def test_by_parts(name, dtype, bias):
    ours, pytorch, x = layers(name, dtype, bias)
    _, forward, backward = ran(lambda: ours(x).sum().backward())
    assert forward == backward == 2
    compare(ours, pytorch, x)
    x = x.detach()  # as the first layer's
    compare(ours, pytorch, x)
    with torch.no_grad():
        less = x[:-1].contiguous()
        assert ran(lambda: ours(less))[1] == 1 and torch.equal(ours(less), pytorch(less))


@pytest.mark.parametrize("padding", ("same", "valid"))
@pytest.mark.parametrize("kernel", ((3, 3), (2, 4)))
def test_string_padding_by_parts(kernel, padding):
    args = ([1, 1], padding)
    w, b = torch.randn(32, 16, *kernel), torch.randn(32)
    ours, pytorch = (Layer(op.conv2d.padding, w, b, args) for op in (torch.ops.tsmem, torch.ops.aten))
    x = torch.randn(7, 16, 128, 130, requires_grad=True)
    assert ran(lambda: ours(x).sum().backward())[1:] == (2, 2)
    compare(ours, pytorch, x)


def test_parts_of_operands_with_gaps():
    """An input and a gradient that are a part of a larger tensor's channels, as those of a concatenation are."""
    ours, pytorch, x = layers("conv2d")
    whole = torch.cat([x.detach(), x.detach()], 1)
    x = whole.narrow(1, 8, 16).requires_grad_()
    assert ran(lambda: ours(x).sum().backward())[1:] == (2, 2)
    compare(ours, pytorch, x)
    compare(ours, pytorch, x, lambda z: torch.randn_like(torch.cat([z, z], 1)).narrow(1, 5, z.size(1)))
    compare(ours, pytorch, x, lambda z: torch.ones(1).expand_as(z))


def test_single_samples_are_not_cut():
    ours, pytorch, x = layers("conv2d")
    x = torch.randn(16, 360, 360, requires_grad=True)
    assert ran(lambda: ours(x))[1] == 1
    compare(ours, pytorch, x)


def test_frozen_parts():
    ours, pytorch, x = layers("conv2d")
    for name in ("w", "b"):
        for layer in (ours, pytorch):
            for n in ("w", "b"):
                getattr(layer, n).requires_grad_(n != name)
        y, z = ours(x), pytorch(x)
        wanted = [[x] + [q for q in m.parameters() if q.requires_grad] for m in (ours, pytorch)]
        g = torch.randn_like(z)
        for a, e in zip(torch.autograd.grad(y, wanted[0], g), torch.autograd.grad(z, wanted[1], g)):
            torch.testing.assert_close(a, e, rtol=2e-4, atol=2e-4 * float(e.abs().max()))


def test_parts_are_differentiable():
    ours, pytorch, x = layers("conv2d")
    found = []
    for layer in (ours, pytorch):
        g = torch.autograd.grad(layer(x).square().mean(), (x, layer.w), create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in g), (x, layer.w, layer.b)))
    for a, e in zip(*found):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4 * float(e.abs().max()))


def test_channels_last_is_not_cut():
    ours, pytorch, x = layers("conv2d")
    x = torch.randn(12, 16, 128, 130).to(memory_format=torch.channels_last).requires_grad_()
    assert ran(lambda: ours(x).sum().backward())[1:] == (1, 1)
    assert ours(x).is_contiguous(memory_format=torch.channels_last)
    compare(ours, pytorch, x)


def test_parts_recomputed():
    ours, _, x = layers("conv2d")

    def run(r):
        return torch.ops.tsmem.act(torch.ops.tsmem.conv2d(x, ours.w, ours.b, [1, 1], [1, 1], [1, 1], 1, r), "silu", [], r)

    (kept, again) = (torch.autograd.grad(run(r).square().sum(), (x, ours.w, ours.b)) for r in (0, 1))
    assert_equal(again, kept)


@pytest.mark.parametrize("name", LARGE)
def test_parts_need_less_memory(name):
    from allocator import memory

    ours, pytorch, x = layers(name)
    a, b = (memory(layer, (x,), warmup=0) for layer in (ours, pytorch))
    assert a.peak < 0.95 * b.peak and a.saved <= b.saved


# Those that PyTorch runs by a matrix of the input's patches, a slab of rows at a time.
PATCHES = {  # op, weight, arguments, input
    "conv3d of one sample": ("conv3d", (12, 16, 3, 3, 3), ([1, 1, 1], [1, 1, 1]), (1, 16, 20, 20, 24), torch.float32),
    "conv3d, strided": ("conv3d", (6, 1, 3, 3, 3), ([2, 1, 2], [1, 0, 1]), (1, 1, 81, 72, 71), torch.float32),
    "conv3d, much padding": ("conv3d", (2, 2, 3, 3, 3), ([1, 1, 1], [7, 0, 1]), (2, 2, 24, 40, 40), torch.float64),
    "conv3d, steps over rows": ("conv3d", (2, 2, 2, 3, 3), ([3, 1, 1], [1, 1, 1]), (1, 2, 90, 50, 50), torch.float64),
    "conv2d": ("conv2d", (5, 8, 3, 3), ([1, 1], [1, 1]), (2, 8, 90, 94), torch.float64),
    "conv1d": ("conv1d", (7, 8, 5), ([1], [2]), (2, 8, 15001), torch.float64),
}


def patches(name, bias=True):
    op, weight, args, shape, dtype = PATCHES[name]
    w, b = torch.randn(weight, dtype=dtype) / 8, torch.randn(weight[0], dtype=dtype) if bias else None
    return *(Layer(overload(o, op), w, b, args) for o in (torch.ops.tsmem, torch.ops.aten)), torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("name", PATCHES)
def test_by_slabs(name, bias):
    ours, pytorch, x = patches(name, bias)
    _, forward, backward = ran(lambda: ours(x).sum().backward())
    assert forward > 1 and backward > 1
    compare(ours, pytorch, x)
    compare(ours, pytorch, x.detach())
    for frozen in ("w", "b")[: 1 + bias]:
        for layer in (ours, pytorch):
            getattr(layer, frozen).requires_grad_(False)
        y, z = ours(x), pytorch(x)
        g = torch.randn_like(z)
        wanted = [[x, *(q for q in layer.parameters() if q.requires_grad)] for layer in (ours, pytorch)]
        tolerance = {torch.float64: 1e-9, torch.float32: 2e-4}[x.dtype]
        for a, e in zip(*(torch.autograd.grad(out, w, g) for out, w in ((y, wanted[0]), (z, wanted[1])))):
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * float(e.abs().max()))


@pytest.mark.parametrize("name", PATCHES)
def test_slabs_need_less_memory(name):
    from allocator import memory

    ours, pytorch, x = patches(name)
    a, b = (memory(layer, (x,), warmup=0) for layer in (ours, pytorch))
    assert a.peak < 0.9 * b.peak and a.saved <= b.saved


def test_slabs_are_differentiable():
    ours, pytorch, x = patches("conv2d")
    found = []
    for layer in (ours, pytorch):
        g = torch.autograd.grad(layer(x).square().mean(), (x, layer.w), create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in g), (x, layer.w, layer.b)))
    for a, e in zip(*found):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9 * float(e.abs().max()))


@pytest.mark.parametrize("weight,shape,args", (
    ((8, 8, 1, 1), (1, 8, 300, 300), ([1, 1], [0, 0])),  # needs no patches
    ((8, 4, 3, 3), (2, 8, 90, 94), ([1, 1], [1, 1], [1, 1], 2)),  # of groups
    ((4, 8, 3, 3), (1, 8, 40, 40), ([1, 1], [1, 1])),  # few of them
    ((5, 8, 3, 3), (2, 8, 230, 90), ([2, 1], [3, 0], [3, 2])),  # dilated: of one sample at a time
))  # fmt: skip
def test_not_by_slabs(weight, shape, args):
    w, b = torch.randn(weight, dtype=torch.float64), torch.randn(weight[0], dtype=torch.float64)
    ours, pytorch = (Layer(op.conv2d, w, b, args) for op in (torch.ops.tsmem, torch.ops.aten))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert ran(lambda: ours(x).sum().backward())[1:] == (1, 1)
    compare(ours, pytorch, x)


# Those whose weight is large beside their input: the weight's gradient is made some channels at a time.
HEAVY = {  # op, weight, arguments, input
    "conv2d": ("conv2d", (256, 512, 3, 3), ([1, 1], [1, 1]), (2, 512, 6, 7)),
    "conv2d, parts that differ": ("conv2d", (512, 270, 3, 3), ([2, 1], [1, 0]), (2, 270, 7, 6)),
    "conv2d, dilated": ("conv2d", (256, 512, 3, 3), ([1, 1], [5, 5], [5, 5]), (3, 512, 6, 6)),
    "conv2d, of groups": ("conv2d", (768, 48, 6, 6), ([1, 1], [3, 3], [1, 1], 16), (2, 768, 5, 4)),
    "conv1d, of groups": ("conv1d", (768, 48, 32), ([1], [16], [1], 16), (1, 768, 20)),
    "conv3d": ("conv3d", (256, 256, 3, 3, 3), ([1, 1, 1], [1, 1, 1]), (2, 256, 2, 4, 5)),
    "transposed": ("conv_transpose2d", (512, 256, 4, 4), ([2, 2], [1, 1]), (2, 512, 4, 3)),
    "transposed, of groups": ("conv_transpose2d", (512, 160, 4, 4), ([2, 2], [1, 1], [1, 1], 4), (2, 512, 3, 3)),
    "transposed, 3d": ("conv_transpose3d", (512, 256, 2, 2, 2), ([2, 2, 2],), (2, 512, 2, 2, 3)),
}


@pytest.fixture
def two_threads():
    """How many parts there are depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def heavy(name, dtype=torch.float32, bias=True, last=""):
    """Ours, PyTorch, and an input. `last`: what is channels_last, of "x" and "w"."""
    op, weight, args, shape = HEAVY[name]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    x, w = (
        torch.randn(s, dtype=dtype).contiguous(memory_format=formats[len(s)] if letter in last else torch.contiguous_format)
        for s, letter in ((shape, "x"), (weight, "w"))
    )
    groups = args[3] if len(args) > 3 else 1
    b = torch.randn(groups * weight[1] if op.startswith("conv_transpose") else weight[0], dtype=dtype) if bias else None
    return *(Layer(overload(o, op), w / 8, b, args) for o in (torch.ops.tsmem, torch.ops.aten)), x.requires_grad_()


@pytest.mark.parametrize("last", ("", "x", "w", "xw"))
@pytest.mark.parametrize("name", HEAVY)
def test_heavy_weights(name, last, two_threads):
    if last and name.startswith("conv1d"):
        return
    for bias in (True, False):
        ours, pytorch, x = heavy(name, bias=bias, last=last)
        _, forward, backward = ran(lambda: ours(x).sum().backward())  # noqa: B023
        assert forward == 1 and backward > 2, backward
        found = compare(ours, pytorch, x)
        want = torch.autograd.grad(pytorch(x).sum(), [x, *pytorch.parameters()])
        assert [g.stride() for g in found] == [g.stride() for g in want]
        compare(ours, pytorch, x.detach())


@pytest.mark.parametrize("name", HEAVY)
def test_frozen_beside_a_heavy_weight(name):
    ours, pytorch, x = heavy(name)
    for layer in (ours, pytorch):
        layer.b.requires_grad_(False)
    g = torch.randn_like(pytorch(x))
    for a, e in zip(*(torch.autograd.grad(layer(x), (x, layer.w), g) for layer in (ours, pytorch)), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-4, atol=2e-4 * float(e.abs().max()))
    for layer in (ours, pytorch):
        layer.w.requires_grad_(False)
        layer.b.requires_grad_(True)
    assert ran(lambda: ours(x).sum().backward())[2] == 1
    for a, e in zip(*(torch.autograd.grad(layer(x), (x, layer.b), g) for layer in (ours, pytorch)), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-4, atol=2e-4 * float(e.abs().max()))


def test_a_heavy_weight_behind_what_is_made_again():
    ours, _, x = heavy("conv2d")

    def run(r):
        return torch.ops.tsmem.conv2d(torch.ops.tsmem.act(x, "silu", [], r), ours.w, ours.b, [1, 1], [1, 1], [1, 1], 1, r)

    (kept, again) = (torch.autograd.grad(run(r).square().sum(), (x, ours.w, ours.b)) for r in (0, 1))
    assert_equal(again, kept)


def test_heavy_weights_are_differentiable():
    ours, pytorch, x = heavy("conv2d", dtype=torch.float32)
    found = []
    for layer in (ours, pytorch):
        g = torch.autograd.grad(layer(x).square().mean(), (x, layer.w), create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in g), (x, layer.w, layer.b)))
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3 * float(e.abs().max()))


@pytest.mark.parametrize("permuted", ("w", "x", "xw"))
def test_heavy_weights_of_other_layouts(two_threads, permuted):
    w, x = torch.randn(512, 32, 512), torch.randn(2, 20, 512)
    w = w.transpose(1, 2) if "w" in permuted else torch.randn(512, 512, 32)
    x = (x.transpose(1, 2) if "x" in permuted else torch.randn(2, 512, 20)).requires_grad_()
    ours, pytorch = (Layer(op.conv1d, w, None, ([1], [16])) for op in (torch.ops.tsmem, torch.ops.aten))
    assert ran(lambda: ours(x).sum().backward())[2] > 2
    found = compare(ours, pytorch, x)
    want = torch.autograd.grad(pytorch(x).sum(), [x, *pytorch.parameters()])
    assert [g.stride() for g in found] == [g.stride() for g in want]


def test_batched_gradients_of_heavy_weights():
    ours, pytorch, x = heavy("conv2d")
    g = torch.randn(2, *pytorch(x).shape)
    found, want = (torch.autograd.grad(layer(x), (x, layer.w, layer.b), g, is_grads_batched=True) for layer in (ours, pytorch))
    for a, e in zip(found, want, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-4, atol=2e-4 * float(e.abs().max()))


def test_heavy_weights_in_16_bits():
    ours, pytorch, x = heavy("conv2d", dtype=torch.bfloat16)
    g = torch.randn_like(pytorch(x))
    for a, e in zip(*(torch.autograd.grad(layer(x), (x, layer.w, layer.b), g) for layer in (ours, pytorch)), strict=True):
        assert a.dtype == e.dtype == torch.bfloat16
        torch.testing.assert_close(a, e, rtol=2e-2, atol=1e-2 * float(e.abs().max()))


@pytest.mark.parametrize("last", ("", "xw"))
@pytest.mark.parametrize("name", HEAVY)
def test_heavy_weights_need_less_memory(name, last, two_threads):
    from allocator import memory

    if last and name.startswith("conv1d"):
        return
    ours, pytorch, x = heavy(name, last=last)
    a, b = (memory(layer, (x,), warmup=0) for layer in (ours, pytorch))
    assert a.peak < 0.85 * b.peak and a.saved <= b.saved, (a, b)


@pytest.mark.parametrize("weight,shape,dtype,groups", (
    ((256, 256, 3, 3), (2, 256, 6, 6), torch.float32, 1),  # small
    ((256, 512, 3, 3), (16, 512, 12, 12), torch.float32, 1),  # small beside its input
    ((256, 512, 3, 3), (2, 512, 6, 6), torch.float64, 1),  # not oneDNN's
    ((16384, 24, 3, 3), (2, 24, 3, 3), torch.float32, 1),  # of few channels
    ((512, 256, 3, 3), (2, 512, 4, 4), torch.float32, 2),  # of few groups
    ((512, 512, 3, 3), (1, 512, 7, 7), torch.float32, 1),  # its parts would not be oneDNN's
    ((4096, 32, 3, 3), (2, 32, 2, 2), torch.float32, 1),  # of 32 channels, which make two parts
))  # fmt: skip
def test_weights_that_are_not_heavy(weight, shape, dtype, groups):
    w = torch.randn(weight, dtype=dtype)
    ours, pytorch = (Layer(op.conv2d, w, None, ([1, 1], [1, 1], [1, 1], groups)) for op in (torch.ops.tsmem, torch.ops.aten))
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    assert ran(lambda: ours(x).sum().backward())[2] == 1
    compare(ours, pytorch, x)
