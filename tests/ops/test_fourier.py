"""Fourier transforms of real tensors, which keep sizes only."""

import pytest
import torch
from op_checks import channels_last, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")
WINDOW = torch.hann_window(16, dtype=torch.float64)

CASES = {
    "fft": lambda o, x: o.fft_fft(x),
    "fft of another size": lambda o, x: o.fft_fft(x, 12, 1, "ortho"),
    "rfft": lambda o, x: o.fft_rfft(x),
    "rfft of another size": lambda o, x: o.fft_rfft(x, 9, -2, "forward"),
    "rfft2": lambda o, x: o.fft_rfft2(x),
    "rfft2 of other sizes": lambda o, x: o.fft_rfft2(x, [7, 12], [0, 1], "ortho"),
    "rfftn": lambda o, x: o.fft_rfftn(x),
    "rfftn of other sizes": lambda o, x: o.fft_rfftn(x, [5], [-2], None),
    "stft": lambda o, x: o.stft(x.flatten(0, -2), 16, 4, 16, WINDOW.to(x.dtype), False, True, True),
    "stft of all frequencies": lambda o, x: o.stft(x.flatten(0, -2), 16, 4, None, None, True, False, True),
    "stft, centred": lambda o, x: o.stft(x.flatten(0, -2), 16, 4, 16, WINDOW.to(x.dtype), True, "reflect", False, True, True),
}
EACH = pytest.mark.parametrize("name", CASES)


def both(name):
    return [lambda x, o=o: torch.view_as_real(CASES[name](o, x)) for o in (torch.ops.tsmem, torch.ops.aten)]


def same(a, b):
    for u, v in zip(a, b, strict=True):
        assert torch.equal(u, v) and u.stride() == v.stride()


@EACH
def test_equals_pytorch(name):
    ours, pytorch = both(name)
    for dtype in (torch.float64, torch.float32):
        x = torch.randn(3, 5, 40, dtype=dtype)
        for z in (x, channels_last(x), torch.stack((x, x), -1)[..., 0], x[:1].expand(2, 5, 40), x[0]):
            for grad in (True, False):
                same(run(ours, z.requires_grad_(grad)), run(pytorch, z))


@EACH
def test_keeps_nothing(name):
    ours = both(name)[0]
    x = torch.randn(64, 5, 160, requires_grad=True)
    assert live_bytes(lambda: ours(x * 1)) <= 4096


@EACH
def test_gradcheck(name):
    x = torch.randn(2, 3, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(both(name)[0], x)
    assert torch.autograd.gradgradcheck(both(name)[0], x)


@EACH
def test_what_they_do_not_change(name):
    """Complex tensors, whole numbers, saved-tensor hooks, transforms of transforms, freed and retained graphs, autocast, torch.func."""
    f, g = (lambda x, o=o: CASES[name](o, x) for o in (torch.ops.tsmem, torch.ops.aten))
    x = torch.randn(3, 5, 40, dtype=torch.float64)
    for other in (x.to(torch.complex128).requires_grad_(), x.mul(9).long()):
        try:
            expected = g(other)
        except (RuntimeError, TypeError) as error:
            with pytest.raises(type(error)) as raised:
                f(other)
            assert str(raised.value).splitlines()[0] == str(error).splitlines()[0]
            continue
        assert torch.equal(f(other), expected)
    x.requires_grad_()
    kept, _ = saved(lambda: f(x * 1))
    assert len(kept) <= len(saved(lambda: g(x * 1))[0])  # without a centred one's padding
    again = [torch.autograd.grad(h(h(x).abs()).abs().sum(), x)[0] for h in (f, g)] if "stft" not in name else [x, x]
    assert torch.equal(*again)
    y = f(x).abs().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)
    with torch.autocast("cpu", torch.bfloat16):
        z = torch.randn(3, 5, 40, dtype=torch.bfloat16, requires_grad=True)
        same(run(lambda t: torch.view_as_real(f(t)), z), run(lambda t: torch.view_as_real(g(t)), z))
    ours, theirs = (torch.func.grad(lambda t, h=h: h(t).abs().sum())(x.detach()) for h in (f, g))
    assert torch.equal(ours, theirs)


def test_the_input_may_be_overwritten():
    """As nothing of it is kept: PyTorch's own raises there."""
    x = torch.randn(5, 40, requires_grad=True)
    y = x * 1
    z = torch.ops.tsmem.fft_rfft(y).abs().sum()
    y.mul_(2)
    assert torch.equal(torch.autograd.grad(z, x)[0], torch.autograd.grad(torch.fft.rfft(x * 1).abs().sum(), x)[0])


def test_scripted():
    @torch.jit.script
    def f(x):
        return torch.view_as_real(torch.ops.tsmem.fft_rfft(torch.tanh(x), 16, -1, "ortho"))

    x = torch.randn(4, 20, requires_grad=True)
    for _ in range(4):
        same(run(f, x), run(lambda t: torch.view_as_real(torch.fft.rfft(torch.tanh(t), 16, -1, "ortho")), x))
