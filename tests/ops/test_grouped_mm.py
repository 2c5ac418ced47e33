"""grouped_mm, the product of a mixture of experts: against PyTorch's own and a loop over the groups, and what it keeps."""
import itertools

import pytest
import torch
from op_checks import DTYPES, assert_equal, calls, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("one_thread")


def ours(*given, **named):
    return torch.ops.tsmem._grouped_mm(*given, **named)


pytorch = torch.ops.aten._grouped_mm
WITHOUT_DOUBLE = [d for d in DTYPES if d != torch.float64]  # PyTorch's has none


def ends(*of):
    return torch.tensor(of, dtype=torch.int32)


def operands(kind, dtype=torch.float32, by_columns=(False, False)):
    """a, b and the groups' ends: rows of a by matrices of b, matrices of a by columns of b, parts of the inner dimension, batches."""
    torch.manual_seed(0)
    a, b, groups = {
        "rows": ((24, 16), (3, 16, 32), ends(8, 8, 24)),
        "columns": ((3, 8, 16), (16, 24), ends(8, 8, 24)),
        "inner": ((8, 24), (24, 16), ends(8, 8, 24)),
        "batches": ((3, 8, 16), (3, 16, 32), None),
    }[kind]
    made = [torch.randn(*s, dtype=torch.float64).to(dtype) for s in (a, b)]
    return [*(t.mT.contiguous().mT if c else t for t, c in zip(made, by_columns)), groups]


def by_loop(kind, a, b, groups):
    """The same from matmul alone."""
    if kind == "batches":
        return a @ b
    parts = list(zip([0, *groups.tolist()[:-1]], groups.tolist()))
    if kind == "rows":
        return torch.cat([a[i:j] @ m for (i, j), m in zip(parts, b)])
    if kind == "columns":
        return torch.cat([m @ b[:, i:j] for (i, j), m in zip(parts, a)], 1)
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in parts])


KINDS = ("rows", "columns", "inner", "batches")


def dense(f):
    """f, whose gradient is as a network's is: not one number for all elements, which PyTorch's backward refuses."""
    return lambda *t: f(*t) * 2


@pytest.mark.parametrize("dtype", WITHOUT_DOUBLE)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_pytorch(kind, dtype):
    for by_columns in itertools.product((False, True), repeat=2):
        a, b, groups = operands(kind, dtype, by_columns)
        for needs in itertools.product((False, True), repeat=2):
            given = [t.requires_grad_(n) for t, n in zip((a.detach(), b.detach()), needs)]
            for again in (-1, 0, 1):
                got = run(dense(lambda x, y: ours(x, y, groups, recompute=again)), *given)
                want = run(dense(lambda x, y: pytorch(x, y, groups)), *given)
                assert_equal(got, want)
                assert [t.stride() for t in got] == [t.stride() for t in want]
            for g, w in zip(got, run(dense(lambda x, y: by_loop(kind, x.float(), y.float(), groups)), *given), strict=True):
                torch.testing.assert_close(g.float(), w.float(), rtol=20 * torch.finfo(dtype).eps, atol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(kind):
    """A factor only where the other one needs a gradient, and the groups' ends."""
    a, b, groups = operands(kind)
    for needs in itertools.product((False, True), repeat=2):
        x, y = (t.detach().requires_grad_(n) for t, n in zip((a, b), needs))
        kept, _ = saved(lambda: ours(x, y, groups))
        wanted = [t for t, n in zip((y, x), needs) if n] + ([groups] if groups is not None and any(needs) else [])
        assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in wanted}


def test_what_is_pytorchs():
    a, b, groups = operands("rows")
    for bad in ((a.double(), b.double(), groups), (a, b[:, :8], groups), (a, b, None), (a, b, groups.long()), (a.requires_grad_(), b, groups, torch.ones(3, 32))):
        with pytest.raises(Exception) as theirs:
            pytorch(*bad)
        with pytest.raises(theirs.type) as own:
            ours(*bad)
        assert str(own.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def experts(hidden, up, down, chosen, groups, again):
    """A gated mixture: the rows of each expert, its first layer's two halves, the second layer."""
    o = torch.ops.tsmem
    rows = o.index(hidden, [chosen], again)
    gate, value = o._grouped_mm(rows, up, groups).chunk(2, -1)
    return o._grouped_mm(o.mul(o.act(gate, "silu", [], again), value, again), down, groups)


@pytest.mark.parametrize("dtype", WITHOUT_DOUBLE)
def test_factors_that_are_recomputed(dtype):
    """Neither the rows of the experts nor the gated product is kept."""
    torch.manual_seed(0)
    hidden, up, down = (torch.randn(*s).mul(0.2).to(dtype).requires_grad_() for s in ((256, 64), (4, 64, 256), (4, 128, 64)))
    chosen, groups = torch.randint(0, 256, (512,)), ends(100, 200, 200, 512)
    got, want = (run(dense(lambda *t: experts(*t, chosen, groups, again)), hidden, up, down) for again in (1, 0))
    assert_equal(got, want)
    left = [live_bytes(lambda: experts(hidden, up, down, chosen, groups, again)) for again in (0, 1)]
    gone = 512 * (64 + 128) * hidden.element_size()
    assert left[1] <= left[0] - gone, left


def test_scripted():
    scripted = torch.jit.CompilationUnit("def f(a, b, ends):\n    return torch.ops.tsmem._grouped_mm(a, b, ends, recompute=1) * 2\n").f
    a, b, groups = operands("rows")
    want = run(dense(lambda x: pytorch(x, b, groups)), a.requires_grad_())
    for got in calls(lambda x: scripted(x, b, groups), a):
        assert_equal(got, want)


def test_second_derivatives():
    """PyTorch's backward is differentiable; so is ours where nothing was recomputed."""
    a, b, groups = operands("rows")
    for f in (ours, pytorch):
        x, y = a.detach().requires_grad_(), b.detach().requires_grad_()
        (g,) = torch.autograd.grad((f(x, y, groups) ** 2).sum(), x, create_graph=True)
        seconds = torch.autograd.grad((g * g).sum(), (x, y))
        if f is ours:
            own = seconds
    assert_equal(own, seconds)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        a, b, groups = (mode.from_tensor(t) for t in operands("rows", torch.bfloat16))
        x, y = a.requires_grad_(), b.requires_grad_()
        out = ours(x, y, groups)
        assert out.shape == (24, 32)
        assert [g.shape for g in torch.autograd.grad((out * 2).sum(), (x, y))] == [x.shape, y.shape]
