"""Pools and pads that keep sizes only."""

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, assert_equal, channels_last, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")


def cases():
    for d in (1, 2, 3):
        yield f"avg_pool{d}d", d, ([3] * d, [2] * d, [1] * d, True, False)
        yield f"avg_pool{d}d", d, ([2] * d,)
        yield f"adaptive_avg_pool{d}d", d, ([3] * d,)
        yield f"adaptive_avg_pool{d}d", d, ([1] * d,)
        yield f"reflection_pad{d}d", d, ([1, 2] * d,)
        yield f"replication_pad{d}d", d, ([1, 2] * d,)
        for mode in ("reflect", "replicate", "constant", "circular"):
            yield "pad", d, ([1, 2] * d, mode)
    yield "avg_pool2d", 2, ([3, 2], [2, 1], [1, 0], False, True, 5)


CASES = pytest.mark.parametrize("name,d,args", list(cases()))


def pair(name, args):
    pytorch = getattr(torch.ops.aten, name)
    return (lambda x: getattr(torch.ops.tsmem, name)(x, *args)), (lambda x: pytorch(x, *args))


@CASES
def test_equals_pytorch(name, d, args):
    ours, pytorch = pair(name, args)
    for dtype in DTYPES:
        for shape in ((2, 3), (1, 1), (0, 3) if name != "pad" else (3, 2)):
            x = torch.randn([*shape, *(7, 6, 5)[:d]]).to(dtype)
            for z in (x, channels_last(x), torch.stack((x, x), -1)[..., 0], *(x[:1].unbind())):
                try:
                    expected = run(pytorch, z.requires_grad_())
                except RuntimeError as error:  # an empty batch, or a dtype that PyTorch does not take
                    with pytest.raises(RuntimeError) as raised:
                        run(ours, z)
                    assert str(raised.value).splitlines()[0] == str(error).splitlines()[0]
                    continue
                assert_equal(run(ours, z), expected)
                g = torch.ones(1, dtype=dtype).expand(expected[0].shape)
                assert_equal(run(ours, z, cotangent=g), run(pytorch, z, cotangent=g))


@CASES
def test_keeps_nothing(name, d, args):
    x = torch.randn([2, 8] + [20] * d, requires_grad=True)
    ours = pair(name, args)[0]
    assert saved(lambda: ours(x))[0] == []
    assert live_bytes(lambda: ours(x * 1)) <= 4096


@pytest.mark.parametrize("name,mode", [("pad", "reflect"), ("pad", "replicate"), ("reflection_pad", None), ("replication_pad", None)])
@pytest.mark.parametrize("d", (1, 2, 3))
@pytest.mark.parametrize("last", (False, True))
def test_pads_are_recomputed(name, mode, d, last):
    """Of norm, activation, pad and convolution the norm's input alone is kept, and the numbers are those without recomputation, for four calls."""
    side = 600 if d == 1 else 20  # a few hundred elements aren't worth it
    x = torch.randn([2, 8] + [side] * d)
    x = (channels_last(x).clone() if last else x).requires_grad_()  # a leaf, and no view
    scale, shift = (torch.randn(8, requires_grad=True) for _ in range(2))
    w = torch.randn([4, 8] + [3] * d, requires_grad=True)
    rest = ([1, 2] * d,) if mode is None else ([1, 2] * d, mode, None)
    pad = getattr(torch.ops.tsmem, name if mode else f"{name}{d}d")
    conv = getattr(torch.ops.tsmem, f"conv{d}d")

    def f(recompute):
        y = torch.ops.tsmem.batch_norm_act(x, scale, shift, None, None, True, 0.1, 1e-5, True, "relu", [], recompute)
        return conv(pad(y, *rest, recompute), w)

    assert live_bytes(lambda: f(1)) <= live_bytes(lambda: f(0)) - 4 * 2 * 8 * (side + 3) ** d
    for _ in range(4):
        expected, actual = ([y, *torch.autograd.grad(y.square().sum(), (x, scale, shift, w))] for y in (f(0), f(1)))
        for e, a in zip(expected, actual, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-4)


@CASES
def test_gradcheck(name, d, args):
    x = torch.randn([2, 2] + [5] * d, dtype=torch.float64, requires_grad=True)
    ours = pair(name, args)[0]
    assert torch.autograd.gradcheck(ours, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, x, fast_mode=True)


@CASES
def test_meta_fake_autocast(name, d, args):
    from torch._subclasses.fake_tensor import FakeTensorMode
    ours, pytorch = pair(name, args)
    x = torch.randn([2, 3] + [7] * d)
    meta = x.to("meta").requires_grad_()
    expected = run(pytorch, x.clone().requires_grad_())
    run(ours, meta, cotangent=torch.empty_like(expected[0], device="meta"))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x).requires_grad_()
        ours(fake).sum().backward()
        assert fake.grad.shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in DTYPES:
            z = x.clone().to(dtype).requires_grad_()
            assert_equal(run(ours, z), run(pytorch, z))


def test_errors_are_pytorchs():
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    for name, args in (("avg_pool2d", ([9, 9],)), ("avg_pool2d", ([3, 3], [1, 1], [2, 2])), ("reflection_pad2d", ([9, 9, 1, 1],)),
                       ("reflection_pad1d", ([1, 1],)), ("adaptive_avg_pool2d", ([2, 2, 2],)), ("pad", ([1], "reflect")),
                       ("pad", ([1, 1, 1, 1], "mirror")), ("pad", ([1, 1, 1, 1], "reflect", 1.0)), ("avg_pool1d", ([2],))):
        with pytest.raises(RuntimeError) as expected:
            pair(name, args)[1](x)
        with pytest.raises(RuntimeError) as actual:
            pair(name, args)[0](x)
        assert str(actual.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_pytorch_keeps_sizes_only_where_there_is_no_op():
    """Why upsample_*, mean and interpolate have no op of ours: were PyTorch to start keeping tensors, this would tell."""
    x = {d: torch.randn([2, 3] + [6] * d, requires_grad=True) for d in (1, 2, 3)}
    modes = [(d, m, {}) for d in (1, 2, 3) for m in ("nearest", "nearest-exact")]
    modes += [(1, "linear", {}), (2, "bilinear", {}), (2, "bicubic", {}), (3, "trilinear", {})]
    modes += [(2, m, {"antialias": True}) for m in ("bilinear", "bicubic")]
    for d, mode, kwargs in modes:
        assert saved(lambda: F.interpolate(x[d], scale_factor=2.0, mode=mode, **kwargs))[0] == []
    for f in (lambda: x[2].mean(), lambda: x[2].mean([2, 3]), lambda: x[2].mean([1], dtype=torch.float64)):
        assert saved(f)[0] == []


def test_scripted():
    @torch.jit.script
    def f(x):
        return torch.ops.tsmem.avg_pool2d(torch.ops.tsmem.pad(x * 2.0, [1, 1, 1, 1], "reflect"), [3, 3], [2, 2])

    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    for _ in range(4):
        assert_equal(run(f, x), run(lambda z: F.avg_pool2d(F.pad(z * 2.0, [1] * 4, "reflect"), 3, 2), x))
