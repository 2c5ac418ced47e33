"""cross_entropy_loss: against PyTorch's own and against the formula, and what it keeps."""
import itertools

import allocator
import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, calls, channels_last, live_bytes, run, saved

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


def ours(x, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    return torch.ops.tsmem.cross_entropy_loss(x, target, weight, REDUCTIONS[reduction], ignore_index, label_smoothing)


def given(sizes=(6, 5), dtype=torch.float64, ignored=-100):
    g = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(sizes, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    target = torch.randint(sizes[1], (sizes[0], *sizes[2:]), generator=g)
    target.view(-1)[1] = ignored
    return x, target


def formula(x, target, weight, reduction, ignored):
    """By the definition alone, with no operator of PyTorch's that has to do with losses."""
    x = x.movedim(1, -1)
    p = x.exp() / x.exp().sum(-1, keepdim=True)
    weight = torch.ones(x.size(-1), dtype=x.dtype) if weight is None else weight
    valid = target != ignored
    one_hot = torch.arange(x.size(-1)) == torch.where(valid, target, 0).unsqueeze(-1)
    w = (one_hot * weight).sum(-1) * valid
    losses = -((one_hot * p).sum(-1)).log() * w
    return losses if reduction == "none" else losses.sum() / (w.sum() if reduction == "mean" else 1)


def close(got, want, dtype, factor=8):
    eps = torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        torch.testing.assert_close(g, w, rtol=factor * eps, atol=factor * eps * max(1.0, float(w.abs().max()) if w.numel() else 1.0), equal_nan=True)


SIZES = [(6, 5), (2, 3), (2, 4, 7), (2, 5, 3, 4), (3, 2, 2, 3, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_pytorch(reduction, dtype):
    for sizes, weighted, ignored, laid_out in itertools.product(SIZES, (False, True), (-100, 1), ("contiguous", "channels_last", "every second")):
        x, target = given(sizes, dtype, ignored)
        x = x.detach()
        if laid_out == "channels_last":
            x = channels_last(x)
        elif laid_out == "every second":
            x = torch.stack([x, x], -1)[..., 0]
        weight = torch.linspace(0.2, 1.3, sizes[1]).to(dtype) if weighted else None
        pytorch = run(lambda t: F.cross_entropy(t, target, weight, reduction=reduction, ignore_index=ignored), x.requires_grad_())
        got = run(lambda t: ours(t, target, weight, reduction, ignored), x)
        if dtype in (torch.float64, torch.float32):
            close(got, pytorch, dtype, 16)
        else:  # PyTorch's rounds log_softmax to 16 bits: no further than that from float64
            exact = run(lambda t: F.cross_entropy(t, target, None if weight is None else weight.double(), reduction=reduction, ignore_index=ignored),
                        x.detach().double().requires_grad_())
            for g, s, e in zip(got, pytorch, exact):
                assert g.dtype == s.dtype and g.shape == s.shape
                off = lambda t: torch.linalg.vector_norm(t.double() - e)  # noqa: E731
                assert off(g) <= off(s) + 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(e) or not e.isfinite().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_the_formula(reduction):
    for sizes, weighted in itertools.product(SIZES, (False, True)):
        x, target = given(sizes, ignored=0)
        weight = torch.linspace(0.2, 1.3, sizes[1], dtype=torch.float64) if weighted else None
        if reduction == "mean" and (target == 0).all():
            continue
        close(run(lambda t: ours(t, target, weight, reduction, 0), x), run(lambda t: formula(t, target, weight, reduction, 0), x), torch.float64, 64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives(reduction):
    for sizes in SIZES:
        x, target = given(sizes)
        assert torch.autograd.gradcheck(lambda t: ours(t, target, None, reduction), x)
        assert torch.autograd.gradgradcheck(lambda t: ours(t, target, None, reduction), x)


def test_blocks_of_rows_and_of_pixels():
    """Larger than a block: rows of many classes, images of many pixels, more classes than a block has elements; several threads too."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for sizes in ((700, 400), (3, 70_000), (2, 21, 97, 101), (9, 3, 40, 40)):
            x, target = given(sizes)
            for t in (x, channels_last(x.detach()).requires_grad_()):
                close(run(lambda t: ours(t, target), t), run(lambda t: F.cross_entropy(t, target), t), torch.float64, 64)


def test_what_is_kept():
    """The input and the targets; not the log_softmax. Without a gradient nothing."""
    x, target = given((64, 50), torch.float32)
    kept, _ = saved(lambda: ours(x, target, reduction="sum"))
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), target.data_ptr()}
    logits = torch.randn(64, 500, requires_grad=True)
    bytes_of = [live_bytes(lambda: loss(logits * 1.0, target.clamp(min=0))) for loss in (ours, F.cross_entropy)]
    assert bytes_of[0] <= bytes_of[1] + 64
    assert saved(lambda: ours(x.detach(), target))[0] == []


def test_peak():
    """Backward makes one tensor of the logits' size, where PyTorch's makes two."""

    def peak(loss):
        logits, target = torch.randn(256, 1000, requires_grad=True), torch.randint(1000, (256,))
        return allocator.most_held(lambda: loss(logits, target).backward()) / (256 * 1000 * 4)

    assert peak(ours) < 1.6 < 2.8 < peak(F.cross_entropy)


def test_losses_that_the_caller_writes_to():
    x, target = given((6, 5, 4))
    want = F.cross_entropy(x, target, reduction="none")
    loss = ours(x, target, reduction="none")
    assert not loss._is_view()
    for t in (loss, want):
        t *= 2
        t[target == 1] = 0
    close(torch.autograd.grad(loss.sum(), x), torch.autograd.grad(want.sum(), x), torch.float64)


def test_an_input_that_is_recomputed():
    """Logits that are made larger before the loss are not kept at that size."""
    o = torch.ops.tsmem
    small, target = torch.randn(2, 6, 16, 16, requires_grad=True), torch.randint(6, (2, 64, 64))

    def f(t, again):
        wide = o.upsample_bilinear2d.vec(t * 1.0, [64, 64], False, None, again)
        return ours(wide, target)

    close(run(lambda t: f(t, 1), small), run(lambda t: f(t, 0), small), torch.float32)
    kept = [live_bytes(lambda: f(small, again)) for again in (0, 1)]
    assert kept[1] < 0.5 * kept[0]


def test_a_view_of_something_larger_is_not_kept():
    wide, target = torch.randn(64, 1000, requires_grad=True), torch.randint(50, (64,))
    kept, _ = saved(lambda: ours((wide * 1.0)[:, :50], target))
    assert max(t.untyped_storage().nbytes() for t in kept) < 64 * 100 * 4


def test_what_is_pytorchs():
    """Smoothed labels, probabilities, one sample, no element, a weight that wants a gradient, errors: PyTorch's result or error."""
    x, target = given()
    close(run(lambda t: ours(t, target, label_smoothing=0.1), x), run(lambda t: F.cross_entropy(t, target, label_smoothing=0.1), x), torch.float64)
    close(run(lambda t: ours(t, x.detach().softmax(1)), x), run(lambda t: F.cross_entropy(t, x.detach().softmax(1)), x), torch.float64)
    close(run(lambda t: ours(t, target[0]), x[0].detach().requires_grad_()), run(lambda t: F.cross_entropy(t, target[0]), x[0].detach().requires_grad_()), torch.float64)
    nothing = torch.full_like(target, -100)
    close(run(lambda t: ours(t, nothing), x), run(lambda t: F.cross_entropy(t, nothing), x), torch.float64)  # NaN
    empty = torch.zeros(0, 5, requires_grad=True)
    for reduction in REDUCTIONS:
        got, want = (run(lambda t: f(t, target[:0], reduction=reduction), empty) for f in (ours, F.cross_entropy))
        close(got, want, torch.float32)
    bad = [(x, target + 10), (x, target[:3]), (x, target.int()), (x, target.float()), (x, target[None]), (x.detach().long(), target)]
    for logits, t in bad:
        with pytest.raises(Exception) as theirs:
            torch._C._nn.cross_entropy_loss(logits, t)
        with pytest.raises(theirs.type) as own:
            ours(logits, t)
        assert str(own.value) == str(theirs.value)
    for weight in (torch.ones(4, dtype=torch.float64), torch.ones(5)):
        with pytest.raises(Exception) as theirs:
            F.cross_entropy(x, target, weight)
        with pytest.raises(theirs.type) as own:
            ours(x, target, weight)
        assert str(own.value) == str(theirs.value)


def test_what_is_changed_before_backward():
    x, target = given()
    logits = x * 1.0
    loss = ours(logits, target)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scripted_and_autocast():
    source = "def f(x, t, w: Optional[Tensor]):\n    return {}(x, t, w, {}, 1) * 2\n"
    scripted = torch.jit.CompilationUnit(source.format("torch.ops.tsmem.cross_entropy_loss", 1)).f
    pytorch = torch.jit.CompilationUnit(source.format("torch._C._nn.cross_entropy_loss", 1)).f
    x, target = given(ignored=1)
    for weight in (None, torch.linspace(1, 2, 5, dtype=torch.float64)):
        for got in calls(lambda t: scripted(t, target, weight), x):
            close(got, run(lambda t: pytorch(t, target, weight), x), torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        half = x.detach().to(dtype).requires_grad_()
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got, want = (run(lambda t: f(t, target, None), half) for f in (scripted, pytorch))
                eager, expected = run(lambda t: ours(t, target, None, "mean", 1), half), run(lambda t: F.cross_entropy(t, target, ignore_index=1), half)
            close(got, want, dtype)
            close(eager, expected, dtype)


def test_meta_and_vmap():
    x, target = (t.to("meta") for t in given((2, 5, 3, 4)))
    x = x.detach().requires_grad_()
    loss = ours(x, target)
    assert loss.shape == () and torch.autograd.grad(loss, x)[0].shape == x.shape
    xs, ts = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    torch.testing.assert_close(torch.vmap(ours)(xs, ts), torch.stack([F.cross_entropy(x, t) for x, t in zip(xs, ts)]))
