"""mm, bmm, addmm, baddbmm: against PyTorch's own, and what they keep."""
import itertools

import pytest
import torch
from op_checks import DTYPES, assert_equal, calls, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("one_thread")


def operands(name, dtype=torch.float64, n=5, k=7, m=3, batches=2, laid_out="contiguous"):
    """[self,] a, b of one of the operators."""
    g = torch.Generator().manual_seed(0)
    lead = (batches,) if name in ("bmm", "baddbmm") else ()

    def tensor(*sizes):
        if laid_out == "contiguous":
            return torch.randn(*lead, *sizes, generator=g, dtype=torch.float64).to(dtype)
        return torch.randn(*lead, *reversed(sizes), generator=g, dtype=torch.float64).to(dtype).mT

    factors = [tensor(n, k), tensor(k, m)]
    return factors if name in ("mm", "bmm") else [torch.randn(m, generator=g, dtype=torch.float64).to(dtype), *factors]


NAMES = ("mm", "bmm", "addmm", "baddbmm")


def close(got, want, dtype, factor=8):
    eps = torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        torch.testing.assert_close(g, w, rtol=factor * eps, atol=factor * eps * max(1.0, float(w.abs().max()) if w.numel() else 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_pytorch(name, dtype):
    ours, pytorch = getattr(torch.ops.tsmem, name), getattr(torch, name)
    for laid_out in ("contiguous", "transposed"):
        inputs = operands(name, dtype, laid_out=laid_out)
        for needs in itertools.product((False, True), repeat=len(inputs)):
            given = [t.detach().requires_grad_(n) for t, n in zip(inputs, needs)]
            for again in (-1, 0, 1):
                got, want = run(lambda *t: ours(*t, recompute=again), *given), run(pytorch, *given)
                close(got, want, dtype)
                assert got[0].stride() == want[0].stride()


@pytest.mark.parametrize("name, rows", [("mm", (5,)), ("matmul", (5,)), ("matmul", (2, 5))])
def test_the_gradient_of_a_transposed_factor_lies_as_pytorchs(name, rows):
    """In another layout than its parameter a gradient is copied once more in every step."""
    f = getattr(torch.ops.tsmem, name)
    w, x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(*rows, 4, dtype=torch.float64)
    for again in (-1, 0, 1):
        got, want = (torch.autograd.grad(g(x, w.t()).square().sum(), w)[0] for g in (lambda a, b: f(a, b, again), torch.matmul))
        assert got.stride() == want.stride() == w.stride()
        torch.testing.assert_close(got, want)
    if len(rows) == 1:  # the first factor's too
        a = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        got, want = (torch.autograd.grad(g(a.t(), w.t()).square().sum(), a)[0] for g in (f, torch.matmul))
        assert got.stride() == want.stride() == a.stride()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ("addmm", "baddbmm"))
def test_numbers_before_the_terms(name):
    inputs = [t.requires_grad_() for t in operands(name)]
    for beta, alpha in ((2, 1), (1, -0.5), (0, 3), (0.25, 0)):
        ours = run(lambda *t: getattr(torch.ops.tsmem, name)(*t, beta, alpha), *inputs)
        close(ours, run(lambda *t: getattr(torch, name)(*t, beta=beta, alpha=alpha), *inputs), torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name):
    inputs = [t.requires_grad_() for t in operands(name)]
    f = getattr(torch.ops.tsmem, name)
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept(name):
    """A factor only where the other one needs a gradient; the sum's first term never."""
    *first, a, b = operands(name)
    for needs in itertools.product((False, True), repeat=2):
        x, y = (t.detach().requires_grad_(n) for t, n in zip((a, b), needs))
        kept, _ = saved(lambda: getattr(torch.ops.tsmem, name)(*(t.detach().requires_grad_() for t in first), x, y))
        assert {t.data_ptr() for t in kept} == {t.data_ptr() for t, n in zip((y, x), needs) if n}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_pytorchs(name):
    """No element, integers, a wrong number of dimensions: PyTorch's result or error."""
    ours, pytorch = getattr(torch.ops.tsmem, name), getattr(torch, name)
    empty = [t.requires_grad_() for t in operands(name, n=0)]
    assert_equal(run(ours, *empty), run(pytorch, *empty))
    nothing = [t.requires_grad_() for t in operands(name, k=0)]
    assert_equal(run(ours, *nothing), run(pytorch, *nothing))
    whole = [t.mul(3).long() for t in operands(name)]
    assert_equal([ours(*whole)], [pytorch(*whole)])
    *first, a, b = (t.requires_grad_() for t in operands(name))
    for bad in ((a, b[..., :2, :]), (a[0], b), (a, b.float()), (a[None], b[None]), (a, b[..., 0])):
        with pytest.raises(Exception) as theirs:
            pytorch(*first, *bad)
        with pytest.raises(theirs.type) as own:
            ours(*first, *bad)
        assert str(own.value) == str(theirs.value)


def layer(x, norm, weight, bias, again):
    """GPT-2's way: a layer norm, and a product on the rows of all images."""
    o = torch.ops.tsmem
    y = o.layer_norm(x, [x.size(-1)], *norm, 1e-5, True, again)
    return o.addmm(bias, y.view(-1, y.size(-1)), weight).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_that_is_recomputed(dtype):
    """Bytes: the layer norm's output is not kept. In blocks of rows, too."""
    for rows in (64, 5000):
        x = torch.randn(2, rows, 32).to(dtype).requires_grad_()
        norm = [torch.ones(32, dtype=dtype, requires_grad=True), torch.zeros(32, dtype=dtype, requires_grad=True)]
        weight, bias = (torch.randn(32, 8) / 8).to(dtype).requires_grad_(), torch.zeros(8, dtype=dtype, requires_grad=True)
        f = lambda again: lambda x, w, b, *n: layer(x, n, w, b, again)  # noqa: E731
        got, want = (run(f(again), x, weight, bias, *norm) for again in (1, 0))
        close(got, want, dtype, 40)
        kept = [live_bytes(lambda: layer(x, norm, weight, bias, again)) for again in (0, 1)]
        assert kept[1] <= kept[0] - 0.9 * x.numel() * x.element_size(), kept


@pytest.mark.parametrize("name", NAMES)
def test_scripted_and_autocast(name):
    arguments = ", ".join(("s", "a", "b") if "add" in name else ("a", "b"))
    scripted = torch.jit.CompilationUnit(f"def f({arguments}):\n    return torch.ops.tsmem.{name}({arguments}, recompute=1) * 2\n").f
    pytorch = torch.jit.CompilationUnit(f"def f({arguments}):\n    return torch.{name}({arguments}) * 2\n").f
    inputs = [t.requires_grad_() for t in operands(name)]
    for ours in calls(scripted, inputs[0], 0) + [run(scripted, *inputs) for _ in range(4)]:
        close(ours, run(pytorch, *inputs), torch.float64)
    inputs = [t.float().detach().requires_grad_() for t in inputs]
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = run(scripted, *inputs), run(pytorch, *inputs)
        close(got, want, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = run(getattr(torch.ops.tsmem, name), *inputs), run(getattr(torch, name), *inputs)
    close(got, want, torch.bfloat16)


def test_meta():
    s, a, b = (t.to("meta").requires_grad_() for t in operands("baddbmm"))
    y = torch.ops.tsmem.baddbmm(s, a, b)
    assert y.shape == (2, 5, 3)
    assert [g.shape for g in torch.autograd.grad(y.sum(), (s, a, b))] == [s.shape, a.shape, b.shape]


def test_vmap():
    a, b = torch.randn(4, 5, 6), torch.randn(6, 3)
    torch.testing.assert_close(torch.vmap(lambda t: torch.ops.tsmem.mm(t, b))(a), a @ b)
    torch.testing.assert_close(torch.vmap(lambda t: torch.ops.tsmem.addmm(b[0], t, b))(a), a @ b + b[0])
