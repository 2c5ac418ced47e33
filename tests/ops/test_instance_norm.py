"""instance_norm_act against at::instance_norm and the activation: values, gradients, running statistics, what is kept."""
import itertools

import pytest
import torch
import tsmem  # noqa: F401  loads the operators
from op_checks import DTYPES, live_bytes
from test_norm import ACTS, Case

ops = torch.ops.tsmem
SHAPES = [(4, 5, 7, 9), (3, 4, 31), (2, 3, 3, 10, 2), (1, 3, 41, 5), (6, 7, 1, 3), (2, 70, 3, 3)]


def pair(act, stats, recompute=False):
    args, f = ACTS[act]
    common = (stats, 0.2, 1e-5, True)
    return (
        lambda x, w, b, m, v, z: f(torch.instance_norm(x, w, b, m, v, *common)),
        lambda x, w, b, m, v, z: ops.instance_norm_act(x, w, b, m, v, *common, act, args, recompute),
    )


def assert_alike(got, want, tolerance):
    for g, w in zip(got, want):
        assert (g is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(g.double(), w.double(), rtol=tolerance, atol=tolerance * max(1.0, float(w.abs().max())))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("stats", [True, False])
def test_equals_pytorch(act, stats):
    for shape, affine in itertools.product(SHAPES, (True, False)):
        case = Case(shape, affine=affine)
        for recompute in (False, True):
            pytorch, ours = pair(act, stats, recompute)
            assert_alike(case.run(ours), case.run(pytorch), 1e-9)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("stats", [True, False])
def test_every_combination_of_gradients(needs, stats):
    for layout in (torch.contiguous_format, torch.channels_last):
        case = Case((3, 5, 6, 7), layout)
        pytorch, ours = pair("relu", stats)
        assert_alike(case.run(ours, needs=(*needs, False)), case.run(pytorch, needs=(*needs, False)), 1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    case = Case((4, 6, 9, 8), dtype=dtype)
    pytorch, ours = pair("relu", True)
    exact, mine, theirs = case.run(pytorch, torch.float64), case.run(ours), case.run(pytorch)
    for e, m, t in zip(exact[:4], mine, theirs):
        if e is not None:
            assert m.dtype == t.dtype
            floor = 1e-2 if dtype.itemsize == 2 else 1e-5
            assert (m.double() - e).norm() <= 2 * (t.double() - e).norm() + floor * e.norm()


def test_without_running_statistics_and_unusual_inputs():
    case = Case((3, 4, 6, 6), stats=False)
    pytorch, ours = pair("relu", True)
    assert_alike(case.run(ours), case.run(pytorch), 1e-9)
    empty = torch.randn(0, 3, 4, 4, requires_grad=True)
    assert ops.instance_norm_act(empty, None, None, None, None, True, 0.1, 1e-5, True, "relu", []).shape == empty.shape
    with pytest.raises(RuntimeError):
        ops.instance_norm_act(torch.randn(2, 3, 4, 4), None, None, None, None, False, 0.1, 1e-5, True, "relu", [])
    with pytest.raises(RuntimeError):
        ops.instance_norm_act(torch.randn(2, 3, 4, 4), torch.ones(4), None, None, None, True, 0.1, 1e-5, True, "relu", [])


def test_gradcheck():
    x = torch.randn(2, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w, b: ops.instance_norm_act(x, w, b, None, None, True, 0.1, 1e-5, True, "silu", []), (x, w, b))


def test_keeps_the_input_alone():
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    pytorch, ours = pair("relu", True)
    unit = x.numel() * 4
    # x is the caller's; PyTorch keeps relu's output besides.
    assert live_bytes(lambda: pytorch(x, None, None, None, None, None)) <= 0.1 * unit  # the output itself is not counted
    w = torch.randn(16, 16, 3, 3, requires_grad=True)

    def block(f, recompute):
        z = f(ops.conv2d(x, w, None, [1, 1], [1, 1]))
        return ops.conv2d(z, w, None, [1, 1], [1, 1]).mean()

    plain = live_bytes(lambda: block(lambda y: pytorch(y, None, None, None, None, None), False))
    kept = live_bytes(lambda: block(lambda y: pair("relu", True, True)[1](y, None, None, None, None, None), True))
    assert plain > 1.9 * unit and kept < 1.1 * unit


class Block(torch.nn.Module):
    def __init__(self, affine, running):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.InstanceNorm2d(8, affine=affine, track_running_stats=running)
        self.conv2 = torch.nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.conv2(torch.relu(self.norm(self.conv1(x))))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("affine,running", [(True, True), (False, False)])
def test_rewritten_module(affine, running, traced):
    torch.manual_seed(0)
    net, x = Block(affine, running).double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)
    pytorch = torch.jit.trace(net, x) if traced else torch.jit.script(net)
    new = tsmem.rewrite(pytorch)
    assert "tsmem::instance_norm_act" in str(new.inlined_graph)
    for _ in range(4):
        results = []
        for m in (pytorch, new):
            m.zero_grad()
            y = m(x)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad.clone() for p in m.parameters()), *(b.clone() for b in m.buffers())])
        assert_alike(results[1], results[0], 1e-9)


@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("dtypes", ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.float32)))
@pytest.mark.parametrize("stats", (True, False))
def test_statistics_of_another_dtype(stats, dtypes, affine):
    """They are computed in the weight's dtype, or else in the input's, and written in their own."""
    dtype, other = dtypes
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64).to(dtype)
    weight = bias = None
    if affine:
        weight, bias = torch.rand(4, dtype=torch.float64).to(dtype), torch.randn(4, dtype=torch.float64).to(dtype)
    results = []
    for f in pair("relu", stats):
        mean, var = torch.linspace(-1, 1, 4, dtype=other), torch.linspace(0.5, 2, 4, dtype=other)
        leaf = x.clone().requires_grad_()
        out = f(leaf, weight, bias, mean, var, None)
        assert out.dtype == dtype
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaf), mean, var])
    for g, w in zip(*results, strict=True):
        assert g.dtype == w.dtype
    assert_alike(*results, 2e-2 if dtype.itemsize == 2 else 1e-5)
