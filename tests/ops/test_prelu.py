"""tsmem::prelu, glu and rrelu against aten's: values, gradients, what is kept, what is recomputed."""
import itertools

import allocator
import pytest
import torch
from op_checks import DTYPES, assert_equal, calls, channels_last, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")
A, ops = torch.ops.aten, torch.ops.tsmem
# Channels innermost and not, one channel, one pixel, more than a chunk, more than a thread's share, an odd rest.
SHAPES = [(4,), (3, 5), (2, 3, 9), (2, 3, 9, 7), (2, 1, 5, 6), (5, 4, 1, 1), (2, 3, 5, 6, 7), (3, 40, 31, 30), (2, 2, 1, 1500)]


def slopes_for(shape, dtype):
    yield torch.tensor([0.25]).to(dtype)
    yield torch.tensor(0.25).to(dtype)
    if len(shape) > 1:
        yield torch.linspace(-0.5, 1.5, shape[1], dtype=torch.float64).to(dtype)


def layouts(shape, dtype):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    yield x
    yield channels_last(x) if x.dim() > 2 else x.t().contiguous().t()
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield torch.randn([*shape[:-1], 2 * shape[-1]], dtype=torch.float64).to(dtype)[..., ::2]


def exact(x, w, cotangent):
    """Output and gradients by elementary operators, in float64."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    over = w if w.numel() == 1 else w.view([1, -1] + [1] * (x.dim() - 2))
    y = torch.where(x > 0, x, x * over)
    return [y.detach(), *torch.autograd.grad(y, [x, w], cotangent.double())]


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prelu(shape, dtype, recompute):
    for slopes in slopes_for(shape, dtype):
        for x in layouts(shape, dtype):
            cotangent = torch.randn(shape, dtype=torch.float64).to(dtype)
            truth = exact(x, slopes, cotangent)
            for wants in ((True, True), (True, False), (False, True)):
                inputs = [t.detach().requires_grad_(want) for t, want in zip((x, slopes), wants)]
                ours, pytorch = (run(f, *inputs, cotangent=cotangent) for f in (lambda x, w: ops.prelu(x, w, recompute), A.prelu))
                assert_equal(ours[:1], pytorch[:1])
                for got, theirs, true in zip(ours[1:], pytorch[1:], [t for t, want in zip(truth[1:], wants) if want]):
                    assert got.dtype == theirs.dtype and got.shape == theirs.shape
                    error, allowed = ((t.double() - true).norm() for t in (got, theirs))
                    # In float64 the truth is summed in PyTorch's order.
                    assert error <= 2 * allowed + max(4 * torch.finfo(dtype).eps, 1e-12) * true.norm()


@pytest.mark.parametrize("last", [False, True])
def test_prelu_borders_and_gradients_in_any_layout(last):
    borders = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, -1e-30, 2.0, -2.0])
    x = borders.repeat_interleave(64).view(1, 3, -1, 4)
    x, w = (channels_last(x) if last else x).requires_grad_(), torch.tensor([0.1, 0.2, -0.3], requires_grad=True)
    for g in (torch.randn(x.shape), channels_last(torch.randn(x.shape)), torch.ones(1).expand(x.shape), torch.full(x.shape, float("inf"))):
        ours, pytorch = (run(f, x, w, cotangent=g) for f in (ops.prelu, A.prelu))
        assert_equal(ours[:2], pytorch[:2], layout=False)
        torch.testing.assert_close(ours[2], pytorch[2], equal_nan=True)


def test_prelu_errors_are_pytorchs():
    x = torch.randn(2, 3, 4, requires_grad=True)
    for w in (torch.ones(2), torch.ones(3, 1), torch.ones(3, dtype=torch.float64)):
        for f in (A.prelu, ops.prelu):
            with pytest.raises(RuntimeError):
                f(x, w)
    empty = torch.randn(0, 3, 4, requires_grad=True)
    assert_equal(*(run(f, empty, torch.ones(3, requires_grad=True)) for f in (ops.prelu, A.prelu)))


def test_prelu_keeps_its_input_and_its_norms():
    x, w = torch.randn(2, 8, 100, requires_grad=True), torch.rand(8, requires_grad=True)
    kept, _ = saved(lambda: ops.prelu(x, w))
    assert sorted(k.data_ptr() for k in kept) == sorted(t.data_ptr() for t in (x, w))
    assert saved(lambda: ops.prelu(x.detach(), w.detach()))[0] == []
    x = torch.randn(4, 16, 40, 40, requires_grad=True)
    k, slope, unit = torch.randn(16, 16, 3, 3, requires_grad=True), torch.rand(16, requires_grad=True), x.numel() * 4
    bn = (None, None, None, None, True, 0.1, 1e-5, True)
    for name in ("batch_norm_act", "instance_norm_act"):

        def block(r):
            normed = getattr(ops, name)(ops.conv2d(x, k, None, 1, 1), *bn, "identity", [], r)
            return ops.conv2d(ops.prelu(normed, slope, r), k, None, 1, 1).mean()

        # The convolution's output alone; without recomputing also what the norm and prelu give.
        assert live_bytes(lambda: block(1)) < 1.05 * unit and live_bytes(lambda: block(0)) > 2.9 * unit
        for a, e in zip(*(torch.autograd.grad(block(r), [x, k, slope]) for r in (1, 0))):
            assert torch.equal(a, e)


def test_prelu_backward_makes_nothing_of_the_inputs_size_but_its_gradient():
    x, w = torch.randn(4, 16, 128, 128, requires_grad=True), torch.rand(16, requires_grad=True)

    def peak(f):
        y = f(x * 1.0, w)
        g = torch.ones_like(y)
        return allocator.most_held(lambda: torch.autograd.grad(y, [x, w], g))

    # Its gradient, and that of the multiplication before it.
    assert peak(ops.prelu) < 2.1 * x.numel() * 4


def test_second_derivatives():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([0.1, 0.5, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.prelu, (x, w)) and torch.autograd.gradgradcheck(ops.prelu, (x, w))
    assert torch.autograd.gradcheck(ops.glu, (x,)) and torch.autograd.gradgradcheck(ops.glu, (x,))
    assert torch.autograd.gradcheck(lambda x: drawn(RRELU, x), (x,)) and torch.autograd.gradgradcheck(lambda x: drawn(RRELU, x), (x,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_is_pytorchs(dtype):
    x, w = torch.randn(2, 3, 8).to(dtype).requires_grad_(), torch.rand(3).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours, pytorch = ops.prelu(x, w, 1), A.prelu(x, w) if dtype != torch.float64 else None
    if pytorch is not None:
        assert_equal([ours], [pytorch])

    @torch.jit.script
    def scripted(x, w):
        return torch.ops.tsmem.prelu(x, w, 1)

    if dtype == torch.float32:
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(scripted(x, w), pytorch)


def test_scripted_vmap_and_jvp():
    @torch.jit.script
    def f(x, w):
        return torch.ops.tsmem.prelu(x * 2.0, w) + torch.ops.tsmem.glu(torch.cat([x, x], 1), 1)

    x, w = torch.randn(2, 4, 33, requires_grad=True), torch.rand(4)
    for result in calls(lambda x: f(x, w), x):
        assert_equal(result, run(lambda x: A.prelu(x * 2.0, w) + A.glu(torch.cat([x, x], 1), 1), x))
    batch = torch.randn(5, 2, 4, 6)
    for ours, pytorch in ((lambda t: ops.prelu(t, w, 1), lambda t: A.prelu(t, w)), (lambda t: ops.glu(t, 1, 1), lambda t: A.glu(t, 1))):
        assert_equal([torch.vmap(ours)(batch)], [torch.vmap(pytorch)(batch)])
        tangent = torch.randn(batch[0].shape)
        assert_equal(list(torch.func.jvp(ours, (batch[0],), (tangent,))), list(torch.func.jvp(pytorch, (batch[0],), (tangent,))))


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_glu(dtype, recompute):
    for shape, dim in (((4, 6), -1), ((2, 4, 9), 1), ((3, 6, 5, 7), 1), ((8, 3, 5), 0), ((2, 64, 40, 30), 1), ((0, 4), 1)):
        for x in layouts(shape, dtype):
            x.requires_grad_()
            assert_equal(run(lambda x: ops.glu(x, dim, recompute), x), run(lambda x: A.glu(x, dim), x))
    with pytest.raises(RuntimeError, match="even"):
        ops.glu(torch.randn(3, 5, requires_grad=True))


def test_glu_keeps_its_input():
    x = torch.randn(2, 32, 500, requires_grad=True)
    kept, _ = saved(lambda: ops.glu(x, 1))
    assert [k.data_ptr() for k in kept] == [x.data_ptr()]
    w = torch.randn(32, 16, 1, requires_grad=True)

    def twice(r):
        return ops.conv1d(ops.glu(ops.conv1d(ops.glu(x * 1.0, 1, r), w), 1, r), w).mean()

    unit = x.numel() * 4  # PyTorch: the argument of each glu, and half of one for each convolution
    assert live_bytes(lambda: twice(1)) < 2.05 * unit and live_bytes(lambda: twice(0)) > 2.95 * unit
    for a, e in zip(*(torch.autograd.grad(twice(r), [x, w]) for r in (1, 0))):
        assert torch.equal(a, e)


RRELU = (0.125, 1 / 3)


def drawn(bounds, x, recompute=0, seed=3):
    torch.manual_seed(seed)
    return ops.rrelu(x, *bounds, True, recompute, [])


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_rrelu(dtype, training, recompute):
    for bounds, shape in itertools.product((RRELU, (0.5, 0.5), (-1.0, 1.0)), ((3, 5), (2, 3, 9, 7), (3, 40, 31, 30), (0, 3))):
        for x in layouts(shape, dtype):
            x.requires_grad_()
            results, states = [], []
            for f in (lambda x: ops.rrelu(x, *bounds, training, recompute, []), lambda x: A.rrelu(x, *bounds, training)):
                results.append(run(f, x))
                states.append(torch.get_rng_state())
            assert_equal(*results)
            assert torch.equal(*states)


def test_rrelu_at_borders():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, -1e-30, 2.0, -2.0]).repeat(40).requires_grad_()
    assert_equal(*(run(f, x) for f in (lambda x: ops.rrelu(x, *RRELU, True, 0, []), lambda x: A.rrelu(x, *RRELU, True))))


@pytest.mark.parametrize("training", (True, False))
def test_rrelu_with_bounds_that_pytorch_refuses(training):
    for bounds in ((0.5, 0.25), (float("nan"), 0.5), (0.1, float("inf"))):
        x = torch.randn(8, requires_grad=True)
        with pytest.raises(RuntimeError) as want:
            A.rrelu(x, *bounds, training)
        with pytest.raises(RuntimeError) as got:
            ops.rrelu(x, *bounds, training, 0, [])
        assert str(got.value).splitlines()[0] == str(want.value).splitlines()[0]


def test_rrelu_keeps_bits_and_a_state():
    x = torch.randn(1 << 18, requires_grad=True)
    assert live_bytes(lambda: ops.rrelu(x, *RRELU, True, 0, [])) <= x.numel() // 8 + 8192 < 4 * x.numel() <= live_bytes(lambda: A.rrelu(x, *RRELU, True))
    w = torch.randn(16, 16, 3, 3, requires_grad=True)
    y = torch.randn(4, 16, 64, 64, requires_grad=True)

    def block(r):
        torch.manual_seed(0)
        return ops.conv2d(ops.rrelu(ops.batch_norm_act(ops.conv2d(y, w, None, 1, 1), None, None, None, None, True, 0.1, 1e-5, True, "identity", [], r),
                                    *RRELU, True, r, []), w, None, 1, 1).mean()

    assert live_bytes(lambda: block(1)) < 1.1 * 4 * y.numel()
    for a, e in zip(*(torch.autograd.grad(block(r), [y, w]) for r in (1, 0))):
        assert torch.equal(a, e)


def test_rrelu_draws_anew_for_each_call():
    @torch.jit.script
    def f(x):
        a = torch.ops.tsmem.rrelu(x, 0.125, 0.3333333333333333, True, 1, [])
        b = torch.ops.tsmem.rrelu(x, 0.125, 0.3333333333333333, True, 1, [])
        return a - b

    x = -torch.ones(4000, requires_grad=True)
    for _ in range(4):
        assert (f(x) != 0).float().mean() > 0.9
