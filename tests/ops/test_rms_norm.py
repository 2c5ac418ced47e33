"""rms_norm: against PyTorch's, what is kept, and recomputed."""
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from op_checks import DTYPES, assert_equal, calls, channels_last, live_bytes, run, saved

F = torch.nn.functional


def ours(*shape, eps=None, again=1):
    return lambda x, w=None: torch.ops.tsmem.rms_norm(x, shape, w, eps, again)


def pytorch(*shape, eps=None):
    return lambda x, w=None: F.rms_norm(x, shape, w, eps)


def close(got, want, dtype, factor=4):
    eps = torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        torch.testing.assert_close(g, w, rtol=factor * eps, atol=factor * eps * max(1.0, float(w.abs().max()) if w.numel() else 1.0))


@pytest.mark.parametrize("again", [-1, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_pytorch(ops, dtype, again):
    for sizes, lead in (((3, 5, 8), 2), ((4, 6), 1), ((2, 3, 4, 5), 2), ((7,), 0), ((300, 513), 1)):
        x, shape = torch.randn(sizes).to(dtype), sizes[lead:]
        weight = (torch.rand(shape) + 0.5).to(dtype)
        for needs, eps in itertools.product(itertools.product((False, True), repeat=2), (None, 1e-3)):
            given = [t.detach().requires_grad_(n) for t, n in zip((x, weight), needs)]
            close(run(ours(*shape, eps=eps, again=again), *given), run(pytorch(*shape, eps=eps), *given), dtype, 40)
        alone = x.detach().requires_grad_()
        close(run(ours(*shape, again=again), alone), run(pytorch(*shape), alone), dtype, 40)


def test_float64_and_float32_are_as_near_as_pytorchs(ops):
    x, weight = torch.randn(200, 768, dtype=torch.float64), torch.rand(768, dtype=torch.float64) + 0.5
    exact = run(pytorch(768), x.requires_grad_(), weight.requires_grad_())
    for g, e in zip(run(ours(768, eps=torch.finfo(torch.float64).eps), x, weight), exact, strict=True):
        assert (g - e).norm() < 1e-12 * e.norm()
    for dtype in (torch.float32, torch.bfloat16):
        low = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        exact = run(pytorch(768, eps=1e-6), *(t.detach().double().requires_grad_() for t in low))
        got, theirs = (run(f(768, eps=1e-6), *low) for f in (ours, pytorch))
        for g, s, e in zip(got, theirs, exact, strict=True):
            assert (g.double() - e).norm() <= 1.2 * (s.double() - e).norm()


def test_layouts(ops):
    x = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    for t in (x, channels_last(x), x.transpose(1, 2), x[:, ::2], x[:, :0], x.expand(2, 6, 4, 8)):
        t = t.detach().requires_grad_()
        got, want = run(ours(8), t), run(pytorch(8), t)
        assert got[0].stride() == want[0].stride()
        close(got, want, torch.float64, 40)
    low = torch.randn(4, 8).bfloat16().requires_grad_()
    weight = torch.ones(8, requires_grad=True)
    assert_equal([t.float() for t in run(ours(8), low, weight)], [t.float() for t in run(pytorch(8), low, weight)])


def test_what_is_kept(ops):
    x, w = torch.randn(30, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    assert {(t.data_ptr(), t.numel()) for t in saved(lambda: ours(8)(x, w))[0]} >= {(x.data_ptr(), 240), (w.data_ptr(), 8)}
    assert sorted(t.numel() for t in saved(lambda: ours(8)(x, w))[0]) == [8, 30, 240]
    assert sorted(t.numel() for t in saved(lambda: ours(8)(x.detach(), w))[0]) == [30, 240]
    assert not ours(8)(x.detach(), w.detach()).requires_grad


def test_errors_are_pytorchs(ops):
    x = torch.randn(3, 8, requires_grad=True)
    for f in ((lambda n: n(7)(x)), (lambda n: n()(x)), (lambda n: n(8)(x, torch.ones(3))), (lambda n: n(3, 3, 8)(x))):
        with pytest.raises(Exception) as theirs:
            f(pytorch)
        with pytest.raises(theirs.type) as own:
            f(ours)
        assert str(own.value) == str(theirs.value)


def test_derivatives(ops):
    x, w = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours(5), (x, w))
    for inputs in ((x, w), (x, w.detach()), (x.detach(), w)):
        assert torch.autograd.gradgradcheck(ours(5), inputs)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_recomputed_for_a_linear_layer(ops, dtype):
    """Bytes: what is normalised is kept, and not the result; the same numbers."""
    o = torch.ops.tsmem
    x, w, a = torch.randn(4, 600, 64).to(dtype).requires_grad_(), torch.ones(64, dtype=dtype, requires_grad=True), (torch.randn(8, 64) / 8).to(dtype).requires_grad_()
    f = lambda again: lambda x, w, a: o.linear(o.rms_norm(x, [64], w, None, again), a, None, again)  # noqa: E731
    close(run(f(1), x, w, a), run(f(0), x, w, a), dtype, 40)
    kept = [live_bytes(lambda: f(again)(x, w, a)) for again in (0, 1)]
    assert kept[1] <= kept[0] - 0.9 * x.numel() * x.element_size(), kept


def test_scripted_autocast_meta_and_vmap(ops):
    own = torch.jit.CompilationUnit("def f(x):\n    return torch.ops.tsmem.rms_norm(x * 1, [8], None, 1e-5, 1) * 2\n").f
    theirs = torch.jit.CompilationUnit("def f(x):\n    return torch.rms_norm(x * 1, [8], None, 1e-5) * 2\n").f
    x = torch.randn(6, 8, requires_grad=True)
    for got, want in zip(calls(own, x), calls(theirs, x), strict=True):
        close(got, want, torch.float32, 40)
    for y in (x, x.detach().bfloat16().requires_grad_()):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                close(run(own, y), run(theirs, y), torch.bfloat16)
                close(run(ours(8), y), run(pytorch(8), y), torch.bfloat16)
    m = x.detach().to("meta").requires_grad_()
    y = ours(8)(m)
    assert y.shape == m.shape and torch.autograd.grad(y.sum(), m)[0].shape == m.shape
    torch.testing.assert_close(torch.vmap(ours(8))(x.detach()[None]), pytorch(8)(x.detach()[None]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_on_cuda_it_is_one_kernel(dtype, affine):
    """PyTorch's own there. Fake tensors: the engine of autograd wants a device, so backward's kernel is called as ours calls it."""
    ran = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            ran.append(f.overloadpacket)
            return f(*args, **(kwargs or {}))

    with FakeTensorMode(), Note():
        x, w = (torch.empty(*sizes, dtype=dtype, device="cuda", requires_grad=True) for sizes in ((2, 5, 8), (8,)))
        y = torch.ops.tsmem.rms_norm(x, [8], w if affine else None, 1e-6, 1)
        assert (y.shape, y.dtype) == (x.shape, dtype) and "RmsNorm" in y.grad_fn.name()
        rows, inverse = x.detach().view(10, 8), torch.empty(10, 1, device="cuda")
        grads = torch.ops.aten._fused_rms_norm_backward(rows, rows, [8], inverse, w.detach() if affine else None, [True, affine])
        assert [None if g is None else (g.shape, g.dtype) for g in grads] == [(rows.shape, dtype), (w.shape, dtype) if affine else None]
    assert ran.count(torch.ops.aten._fused_rms_norm) == 1 and not {torch.ops.aten.pow, torch.ops.aten.rsqrt_} & set(ran)
