"""The max pools against aten's: ties, NaN, layouts, and the few bits an output that they keep."""

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, assert_equal, channels_last, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")

# kernel, stride, padding, dilation, ceil_mode
WINDOWS = [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (3, 1, 1, 2, False), (2, None, 0, 1, True),
           (4, 3, 2, 1, True), (5, 3, 1, 1, False)]


def pair(d, kernel, stride, padding, dilation, ceil):
    args = ([kernel] * d, [] if stride is None else [stride] * d, [padding] * d, [dilation] * d, ceil)
    return (lambda x: getattr(torch.ops.tsmem, f"max_pool{d}d")(x, *args)), (lambda x: getattr(torch, f"max_pool{d}d")(x, *args))


def adaptive(d, size):
    return (lambda x: getattr(torch.ops.tsmem, f"adaptive_max_pool{d}d")(x, [size] * d)), (
        lambda x: getattr(F, f"adaptive_max_pool{d}d")(x, size))


def inputs(d, dtype):
    """Many ties, some NaN, minus infinity; all layouts, batched or not; more channels and columns than a block has."""
    for channels, space in ((3, (17, 13, 6)), (20, (9, 8, 7)), (150, (7, 6)), (2, (5, 300))):
        x = torch.randint(-4, 4, [2, channels, *space[:d]]).to(dtype)
        x.view(-1)[torch.randperm(x.numel())[: x.numel() // 10]] = float("nan")
        if d < 3:
            x[0, 0] = -float("inf")  # aten's 3-d channels_last code sends such a window's gradient elsewhere
        if x.dim() != d + 2:
            continue
        yield x.clone().requires_grad_()
        yield channels_last(x).requires_grad_()
        yield x[1].clone().requires_grad_()
        yield torch.stack((x, x), -1)[..., 0].requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", (1, 2, 3))
def test_equals_pytorch(d, dtype):
    for x in inputs(d, dtype):
        for window in WINDOWS:
            ours, pytorch = pair(d, *window)
            expected = run(pytorch, x)
            assert_equal(run(ours, x), expected)
            with torch.no_grad():
                assert_equal([ours(x)], expected[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", (1, 2, 3))
def test_adaptive_equals_pytorch(d, dtype):
    for x in inputs(d, dtype):
        for size in (1, 2, 5):
            ours, pytorch = adaptive(d, size)
            assert_equal(run(ours, x), run(pytorch, x))


@pytest.mark.parametrize("d,kernel,dtype", [(1, 256, torch.uint8), (1, 257, torch.uint16), (2, 16, torch.uint8), (2, 17, torch.uint16),
                                            (2, 257, torch.uint32), (3, 6, torch.uint8), (3, 7, torch.uint16)])
def test_position_width(d, kernel, dtype):
    x = torch.randn([1, 2] + [kernel + 3] * d).requires_grad_()
    ours, pytorch = pair(d, kernel, 2, 0, 1, False)
    assert_equal(run(ours, x), run(pytorch, x))
    (kept,), y = saved(lambda: ours(x))
    assert kept.dtype == dtype and kept.shape == y.shape
    assert kernel**d > 16
    ours, pytorch = adaptive(d, 1)
    z = torch.randn([1, 2] + [kernel] * d).requires_grad_()
    assert_equal(run(ours, z), run(pytorch, z))
    (kept,), _ = saved(lambda: ours(z))
    assert kept.dtype == dtype


@pytest.mark.parametrize("d,kernel,bits", [(1, 2, 1), (1, 3, 2), (1, 4, 2), (1, 5, 4), (2, 2, 2), (2, 3, 4), (2, 4, 4), (2, 5, 8), (3, 2, 4), (3, 3, 8)])
def test_keeps_a_few_bits_an_output(d, kernel, bits):
    x = torch.randn([3, 7] + [kernel * 6 + 1] * d, requires_grad=True)
    for layout in (lambda t: t, channels_last):
        for ours, pytorch in (pair(d, kernel, 1, 0, 1, False), pair(d, kernel, kernel, kernel // 2, 1, True)):
            z = layout(x.detach()).requires_grad_()
            assert_equal(run(ours, z), run(pytorch, z))
            (kept,), y = saved(lambda: ours(z))
            assert kept.dtype == torch.uint8 and kept.numel() == (y.numel() * bits + 7) // 8


def test_keeps_half_a_byte_an_output():
    x = torch.randn(4, 8, 64, 64, requires_grad=True)
    for ours in (pair(2, 3, 2, 1, 1, False)[0], adaptive(2, 16)[0]):
        y = ours(x)
        assert live_bytes(lambda: ours(x * 1)) <= y.numel() // 2 + 4096
    assert saved(lambda: pair(2, 2, 2, 0, 1, False)[0](x.detach()))[0] == []


@pytest.mark.parametrize("d", (1, 2, 3))
def test_gradcheck(d):
    x = torch.randperm(2 * 3 * 5**d).double().view([2, 3] + [5] * d).requires_grad_()
    for f in (pair(d, 3, 2, 1, 1, True)[0], pair(d, 2, 1, 0, 2, False)[0], adaptive(d, 3)[0]):
        assert torch.autograd.gradcheck(f, x, fast_mode=True)
        assert torch.autograd.gradgradcheck(f, x, fast_mode=True)


@pytest.mark.parametrize("d", (1, 2, 3))
def test_gradient_layouts(d):
    x = torch.randn([2, 3] + [9] * d).requires_grad_()
    ours, pytorch = pair(d, 3, 2, 1, 1, False)
    y = pytorch(x).detach()
    for z in (x, channels_last(x.detach()).requires_grad_()):
        for g in (channels_last(torch.randn(y.shape)), torch.ones(1).expand(y.shape), torch.stack((y, y), -1)[..., 0]):
            assert_equal(run(ours, z, cotangent=g), run(pytorch, z, cotangent=g))


@pytest.mark.parametrize("d", (1, 2, 3))
def test_meta_fake_autocast(d):
    from torch._subclasses.fake_tensor import FakeTensorMode
    for (ours, pytorch), layout in ((p, f) for p in (pair(d, 3, 2, 1, 1, False), adaptive(d, 2)) for f in (lambda x: x, channels_last)):
        x = layout(torch.randn([2, 3] + [9] * d))
        expected, _ = run(pytorch, x.clone().requires_grad_())
        meta = x.to("meta").requires_grad_()
        y = ours(meta)
        y.backward(torch.empty_like(expected, device="meta"))
        assert y.stride() == expected.stride() and meta.grad.shape == x.shape
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x).requires_grad_()
            y = ours(fake)
            y.sum().backward()
            assert y.shape == expected.shape and fake.grad.shape == x.shape
        with torch.autocast("cpu", torch.bfloat16):
            for dtype in DTYPES:
                z = x.clone().to(dtype).requires_grad_()
                assert_equal(run(ours, z), run(pytorch, z))


@pytest.mark.parametrize("d", (1, 2, 3))
def test_errors_are_pytorchs(d):
    x = torch.randn([2, 3] + [5] * d, requires_grad=True)
    for args in ([0] * d,), ([3] * d, [0] * d), ([3] * d, [1] * d, [2] * d), ([3] * d, [1] * d, [0] * d, [0] * d), ([9] * d,), ([3] * (d + 1),):
        with pytest.raises(RuntimeError) as expected:
            getattr(torch, f"max_pool{d}d")(x, *args)
        with pytest.raises(RuntimeError) as actual:
            getattr(torch.ops.tsmem, f"max_pool{d}d")(x, *args)
        assert str(actual.value).splitlines()[0] == str(expected.value).splitlines()[0]
    with pytest.raises((RuntimeError, IndexError)):
        getattr(torch.ops.tsmem, f"max_pool{d}d")(torch.randn(5, requires_grad=True), [2] * d)
    empty = torch.randn([0, 3] + [5] * d, requires_grad=True)
    assert_equal(run(pair(d, 2, 2, 0, 1, False)[0], empty), run(pair(d, 2, 2, 0, 1, False)[1], empty))


def test_in_place_after_and_scripted():
    @torch.jit.script
    def f(x):
        return torch.relu_(torch.ops.tsmem.max_pool2d(x * 2.0, [3, 3], [2, 2], [1, 1]))

    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    for _ in range(4):
        assert_equal(run(f, x), run(lambda z: torch.relu_(torch.max_pool2d(z * 2.0, 3, 2, 1)), x))


def test_other_inputs_take_pytorch():
    x = torch.randn(2, 3, 8, 8)
    ours, pytorch = pair(2, 2, 2, 0, 1, False)
    assert_equal(list(torch.func.jvp(ours, (x,), (x,))), list(torch.func.jvp(pytorch, (x,), (x,))))
    assert_equal([torch.func.grad(lambda z: ours(z).sum())(x)], [torch.func.grad(lambda z: pytorch(z).sum())(x)])
    assert_equal([torch.vmap(ours)(x)], [torch.vmap(pytorch)(x)])
    integers = torch.randint(0, 9, (2, 3, 8, 8))
    assert torch.equal(ours(integers), pytorch(integers))


@pytest.mark.parametrize("d", (1, 2, 3))
def test_positions_may_come_back_in_another_layout(d):
    """As torch.autograd.graph.save_on_cpu(pin_memory=True) gives them back."""
    ours, pytorch = pair(d, 3, 2, 1, 1, False)
    x = channels_last(torch.randn(2, 16, *(9, 8, 7)[:d])).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
        y = ours(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(pytorch(x).square().sum(), x)[0])
