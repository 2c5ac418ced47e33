"""einsum and tensordot: against PyTorch's own, bit for bit but for gradients of what a product of elements spreads, and what it keeps."""
import itertools

import pytest
import torch
from op_checks import DTYPES, assert_equal, calls, live_bytes, run

pytestmark = pytest.mark.usefixtures("one_thread")


def ours(*given, **named):
    return torch.ops.tsmem.einsum(*given, **named)


pytorch = torch.ops.aten.einsum

EQUATIONS = {
    "bhid,bhjd->bhij": ((2, 3, 5, 4), (2, 3, 7, 4)),
    "bihd,bjhd->bhij": ((2, 5, 3, 4), (2, 7, 3, 4)),
    "bhij,bjhd->bihd": ((2, 3, 5, 7), (2, 7, 3, 4)),
    "b h i d, b j d -> b h i j": ((2, 3, 5, 4), (2, 7, 4)),
    "ij,jk": ((5, 4), (4, 6)),
    "ji,ki": ((5, 4), (6, 4)),
    "i,j->ij": ((5,), (4,)),
    "i,j->ji": ((5,), (4,)),
    "i,i->": ((5,), (5,)),
    "ij,ij->i": ((5, 4), (5, 4)),
    "ijk,ijk->": ((2, 3, 4), (2, 3, 4)),
    "...ij,...jk->...ik": ((2, 3, 5, 4), (3, 4, 6)),
    "...i,...i->...": ((2, 1, 3), (1, 4, 3)),
    "i...,j...->...ij": ((5, 2, 3), (4, 3)),
    "...ij,jk": ((2, 5, 4), (4, 6)),
    "bij,kj->ikb": ((2, 5, 4), (6, 4)),
    "bci,co->boi": ((2, 3, 4), (3, 6)),
    "ij,kl->kj": ((5, 4), (6, 3)),  # i and l are summed alone
    "ij,jk->ik sized 1": ((5, 1), (4, 6)),
    "bi,bi->b sized 1": ((1, 4), (3, 4)),
    "bclhn,bcshn,bhcls,bcshp->bclhp": ((2, 2, 3, 2, 4), (2, 2, 5, 2, 4), (2, 2, 2, 3, 5), (2, 2, 5, 2, 3)),
    "ij,jk,kl->il": ((3, 4), (4, 5), (5, 6)),
    "a,b,c->cab": ((3,), (4,), (5,)),
    "aB,Bc->ca": ((3, 4), (4, 5)),
}


def operands(equation, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in EQUATIONS[equation]]


def written(equation):
    return equation.removesuffix(" sized 1")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_equals_pytorch(equation, dtype):
    inputs = operands(equation, dtype)
    for laid_out in (lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        for needs in itertools.product((False, True), repeat=len(inputs)):
            given = [laid_out(t).detach().requires_grad_(n) for t, n in zip(inputs, needs)]
            want = run(lambda *t: pytorch(written(equation), t), *given)
            for again in (0, 1, 2, 3, -1):
                got = run(lambda *t: ours(written(equation), t, recompute=again), *given)
                assert_equal(got, want)
                assert [t.stride() for t in got] == [t.stride() for t in want]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_derivatives(equation):
    inputs = [t.requires_grad_() for t in operands(equation)]
    f = lambda *t: ours(written(equation), t)  # noqa: E731
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_a_spread_operand():
    """A product of elements sums its gradient in the wider dtype: nearer to float64 than PyTorch's, which rounds each term."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 64, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    for dtype in DTYPES:
        inputs = [t.to(dtype).requires_grad_() for t in (x, w)]
        got, theirs, want = (run(lambda *t: f("bnd,d->bnd", t), *i) for f, i in ((ours, inputs), (pytorch, inputs), (pytorch, [t.detach().double().requires_grad_() for t in inputs])))
        assert_equal(got[:2], theirs[:2])
        torch.testing.assert_close(got[2].double(), want[2], rtol=0, atol=20 * torch.finfo(dtype).eps * float(want[2].abs().max()))


def test_autocast_on_cuda_casts_the_operands():
    """PyTorch lists einsum there, and not for the CPU."""
    for key in ("AutocastCUDA", "AutocastCPU"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("tsmem::einsum", key) == torch._C._dispatch_has_kernel_for_dispatch_key("aten::einsum", key)


@pytest.mark.parametrize("path", [[0, 1, 0, 1, 0, 1], [2, 3, 0, 1, 1, 0], [3, 0, 2, 0, 0, 1], [1, 3, 1, 2, 0, 1]])
def test_an_order_of_pairs(path):
    equation = "bclhn,bcshn,bhcls,bcshp->bclhp"
    inputs = [t.requires_grad_() for t in operands(equation)]
    for again in (0, 1, 3):
        assert_equal(run(lambda *t: ours(equation, t, path, again), *inputs), run(lambda *t: pytorch(equation, t, path=path), *inputs))


@pytest.mark.parametrize("equation, sizes", [
    ("ij,jk->ik", ((5, 4), (3, 6))), ("ij,jk->iz", ((5, 4), (4, 6))), ("ij,jk->ii", ((5, 4), (4, 6))), ("ij", ((5, 4), (4, 6))),
    ("ij,jk,kl->il", ((5, 4), (4, 6))), ("ij,j.k->ik", ((5, 4), (4, 6))), ("i1,1k->ik", ((5, 4), (4, 6))), ("ijk,jk->ik", ((5, 4), (4, 6))),
    ("....,jk->k", ((5, 4), (4, 6))), ("ij,jk- >ik", ((5, 4), (4, 6))), (".. .,jk->jk", ((5, 4), (4, 6))), ("ij,jk->. ..", ((5, 4), (4, 6))), ("i...j...,jk->k", ((5, 4), (4, 6))), ("", ()), ("ij,jk->->ik", ((5, 4), (4, 6))), ("ij,jk-ik", ((5, 4), (4, 6))),
])
def test_errors_are_pytorchs(equation, sizes):
    inputs = [torch.randn(*s).requires_grad_() for s in sizes]
    with pytest.raises(Exception) as theirs:
        pytorch(equation, inputs)
    with pytest.raises(theirs.type) as own:
        ours(equation, inputs)
    assert str(own.value).splitlines()[0] == str(theirs.value).splitlines()[0]


@pytest.mark.parametrize("path", [[0, 0], [0, 2], [0], [-1, 0], []])
def test_a_wrong_path_is_pytorchs(path):
    inputs = [torch.randn(5, 4).requires_grad_(), torch.randn(4, 6)]
    if len(path) < 2:
        return  # PyTorch reads beyond its end: nothing to compare
    with pytest.raises(RuntimeError, match="invalid contraction"):
        ours("ij,jk->ik", inputs, path)


@pytest.mark.parametrize("equation, sizes", [
    ("ii->i", ((4, 4),)), ("ij->ji", ((5, 4),)), ("ij->", ((5, 4),)), ("iij,jk->ik", ((4, 4, 3), (3, 5))), ("ij,jk->ik", ((0, 4), (4, 6))), ("ij,jk->ik", ((5, 0), (0, 6))),
])
def test_what_is_pytorchs(equation, sizes):
    inputs = [torch.randn(*s, dtype=torch.float64).requires_grad_() for s in sizes]
    assert_equal(run(lambda *t: ours(equation, t, recompute=1), *inputs), run(lambda *t: pytorch(equation, t), *inputs))
    whole = [t.detach().mul(3).long() for t in inputs]
    assert_equal([ours(equation, whole)], [pytorch(equation, whole)])


def attention(x, weight, again):
    """As repositories spell it: heads from one product, scores and their sum by einsum."""
    o = torch.ops.tsmem
    q, k, v = (t.unflatten(-1, (4, 16)) for t in o.linear(o.act(x, "silu", [], min(again, 1)), weight).chunk(3, -1))
    shares = o.softmax(o.mul(o.einsum("bihd,bjhd->bhij", [q, k], None, again), torch.tensor(0.25, dtype=x.dtype), min(again, 1)), -1, None, min(again, 1))
    return o.einsum("bhij,bjhd->bihd", [shares, v], None, again)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_factors_that_are_recomputed(dtype):
    """Scores and probabilities are made again from query and key, which take more than a cheap layer."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 64, 128, dtype=dtype, requires_grad=True), torch.randn(192, 128, dtype=dtype).div(11).requires_grad_()
    got, want = (run(lambda *t: attention(*t, again), x, weight) for again in (3, 0))
    assert_equal(got, want)
    left = [live_bytes(lambda: attention(x, weight, again)) for again in (0, 3)]
    scores = 2 * 4 * 64 * 64 * x.element_size()
    assert left[1] <= left[0] - scores, (left, scores)


@pytest.mark.parametrize("equation", ["bhid,bhjd->bhij", "ij,jk,kl->il"])
def test_scripted_and_autocast(equation):
    inputs = [t.requires_grad_() for t in operands(equation)]
    names = ", ".join("abc"[: len(inputs)])
    scripted = torch.jit.CompilationUnit(f"def f({names}):\n    return torch.ops.tsmem.einsum('{equation}', [{names}], recompute=1) * 2\n").f
    scripted_pytorch = torch.jit.CompilationUnit(f"def f({names}):\n    return torch.einsum('{equation}', [{names}]) * 2\n").f
    for got in calls(lambda x: scripted(x, *inputs[1:]), inputs[0]):
        assert_equal(got, run(lambda x: scripted_pytorch(x, *inputs[1:]), inputs[0]))
    inputs = [t.float().detach().requires_grad_() for t in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for f, g in ((scripted, scripted_pytorch), (lambda *t: ours(equation, t), lambda *t: pytorch(equation, t))):
            for _ in range(3):
                assert_equal(run(f, *inputs), run(g, *inputs))


def test_meta_and_vmap():
    a, b = (t.to("meta").requires_grad_() for t in operands("bhid,bhjd->bhij"))
    y = ours("bhid,bhjd->bhij", [a, b])
    assert y.shape == (2, 3, 5, 7) and [g.shape for g in torch.autograd.grad(y.sum(), (a, b))] == [a.shape, b.shape]
    x, w = torch.randn(4, 5, 6), torch.randn(6, 3)
    torch.testing.assert_close(torch.vmap(lambda t: ours("ij,jk->ik", [t, w]))(x), x @ w)


TENSORDOTS = {  # sizes of both, dimensions of both
    "one": ((5, 4), (4, 6), [1], [0]),
    "behind": ((2, 5, 4), (3, 4), [-1], [1]),
    "in front": ((4, 2, 5), (4, 6), [0], [0]),
    "in the middle": ((2, 4, 5), (6, 4, 3), [1], [1]),
    "two": ((2, 3, 4), (4, 3, 6), [1, 2], [1, 0]),
    "all of one": ((3, 4), (2, 3, 4), [0, 1], [1, 2]),
    "all": ((3, 4), (3, 4), [0, 1], [0, 1]),
    "none": ((3, 4), (2,), [], []),
    "summed in the first": ((3, 4, 5), (5, 1, 2), [1, 2], [1, 0]),
    "summed in the second": ((3, 1, 5), (5, 4, 2), [1, 2], [1, 0]),
}


def dot(name, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    *sizes, mine, theirs = TENSORDOTS[name]
    return [torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in sizes], (mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TENSORDOTS)
def test_tensordot_equals_pytorch(name, dtype):
    inputs, dims = dot(name, dtype)
    for laid_out in (lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        for needs in itertools.product((False, True), repeat=2):
            given = [laid_out(t).detach().requires_grad_(n) for t, n in zip(inputs, needs)]
            want = run(lambda *t: torch.ops.aten.tensordot(*t, *dims), *given)
            for again in (0, 1, 2, 3, -1):
                got = run(lambda *t: torch.ops.tsmem.tensordot(*t, *dims, again), *given)
                assert_equal(got[:1], want[:1])
                for g, w in zip(got[1:], want[1:], strict=True):  # PyTorch's mm asks for a transposed product where a factor lies transposed
                    torch.testing.assert_close(g, w, rtol=0, atol=16 * torch.finfo(dtype).eps * max(1.0, float(w.abs().max())))
                assert got[0].stride() == want[0].stride()


@pytest.mark.parametrize("name", TENSORDOTS)
def test_derivatives_of_tensordot(name):
    inputs, dims = dot(name)
    f = lambda *t: torch.ops.tsmem.tensordot(*t, *dims)  # noqa: E731
    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in inputs])
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("sizes, dims", [
    (((5, 4), (3, 6)), ([1], [0])), (((5, 4), (4, 6)), ([1], [0, 1])), (((5, 4), (4, 6)), ([2], [0])), (((5, 4, 4), (4, 4)), ([1, 1], [0, 1])), (((0, 4), (4, 6)), ([1], [0])),
])
def test_what_is_pytorchs_tensordot(sizes, dims):
    inputs = [torch.randn(*s).requires_grad_() for s in sizes]
    ends = []
    for f in (torch.ops.aten.tensordot, torch.ops.tsmem.tensordot):
        try:
            ends.append((f(*inputs, *dims).shape, None))
        except (RuntimeError, IndexError) as error:
            ends.append((type(error), str(error).splitlines()[0]))
    assert ends[0] == ends[1]


def test_what_tensordot_keeps():
    """A copy in another order is made again from what it is a copy of; a frozen factor is not needed."""
    x, w = torch.randn(64, 32, 16, requires_grad=True), torch.randn(32, 8, requires_grad=True)

    def again(recompute):
        y = torch.ops.tsmem.act(x, "silu", [], recompute)
        return torch.ops.tsmem.tensordot(y, w, [1], [0], recompute)

    assert live_bytes(lambda: again(0)) >= x.numel() * 4
    assert live_bytes(lambda: again(3)) <= 512
    assert live_bytes(lambda: torch.ops.tsmem.tensordot(x * 1, w.detach(), [1], [0], 3)) <= 512
