"""What the tests of the single ops share: run an op and its reference alike, and compare."""

import allocator
import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def channels_last(x):
    """x with its channels innermost, whatever its number of dimensions."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def run(f, *inputs, cotangent=None):
    """[f(*inputs), gradients of the inputs that require one], from fresh leaves with the inputs' layouts, and seeds set."""
    leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.manual_seed(0)
    y = f(*leaves)
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    if not wanted:
        return [y]
    if cotangent is None:
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, wanted, cotangent)]


class _Hardsigmoid(torch.autograd.Function):
    """float64: the derivative is 1/6 rounded to float64, as TorchScript differentiates it; eager mode's constant is a float32."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ops.aten.hardsigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where((x > -3) & (x < 3), g * (1 / 6), 0)


def hardsigmoid(x):
    return _Hardsigmoid.apply(x) if x.dtype == torch.float64 else torch.ops.aten.hardsigmoid(x)


def assert_equal(actual, expected, layout=True):
    """Bit for bit (NaN equals NaN); the outputs in the same layout."""
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected)):
        assert a.dtype == e.dtype and a.shape == e.shape
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
        if layout and i == 0 and a.numel():
            assert a.stride() == e.stride()


def saved(f):
    """The tensors that f() saves for backward, each storage once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = f()
    return list(kept.values()), y


def live_bytes(f):
    """Bytes that the allocator holds after f() beyond its result: also what is kept in no saved tensor."""
    f()
    with allocator.recorded() as profile:
        y = f()
    return sum(e.self_cpu_memory_usage for e in profile.events()) - y.numel() * y.element_size()


def calls(module, x, times=4):
    """Output and gradient of a scripted module, for each of several calls."""
    return [run(module, x) for _ in range(times)]
