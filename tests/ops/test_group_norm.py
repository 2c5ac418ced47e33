"""group_norm_act against at::group_norm and the activation: values, gradients, layouts, what is kept, what the pattern takes."""
import itertools

import pytest
import torch
import torch.nn.functional as F
import tsmem  # noqa: F401  loads the operators
from op_checks import DTYPES, live_bytes
from test_norm import ACTS, CONTIGUOUS, LAST, LAST_3D, Case, as_good, same

ops = torch.ops.tsmem
# Sizes and groups: odd ones, one channel a group, one group, one image, one value a group, groups longer than what a task of the kernels takes.
SHAPES = [
    ((4, 6, 7, 9), 3, CONTIGUOUS), ((4, 6, 7, 9), 3, LAST), ((3, 4, 31), 4, CONTIGUOUS), ((2, 10, 3, 10, 2), 5, LAST_3D), ((2, 10, 3, 10, 2), 2, CONTIGUOUS),
    ((1, 3, 41, 5), 1, CONTIGUOUS), ((1, 3, 41, 5), 1, LAST), ((6, 12), 4, CONTIGUOUS), ((5, 8, 1, 1), 2, CONTIGUOUS), ((2, 70, 3, 3), 7, LAST),
    ((3, 16, 90, 60), 2, CONTIGUOUS), ((3, 16, 90, 60), 2, LAST), ((2, 520, 2, 1), 4, CONTIGUOUS),
]  # fmt: skip

# There PyTorch's own backward of a channels_last group norm ends the process where the input needs no gradient.
CRASHES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)


def pair(act, groups, recompute=0):
    args, f = ACTS[act]
    return (
        lambda x, w, b, m, v, z: f(F.group_norm(x, groups, w, b, 1e-4)),
        lambda x, w, b, m, v, z: ops.group_norm_act(x, groups, w, b, 1e-4, True, act, args, recompute),
    )


@pytest.mark.parametrize("act", ACTS)
def test_equals_pytorch(act):
    for (shape, groups, layout), affine in itertools.product(SHAPES, (True, False)):
        case = Case(shape, layout, affine=affine, stats=False)
        for recompute in (0, 1):
            pytorch, ours = (case.run(f, needs=(True, True, True, False)) for f in pair(act, groups, recompute))
            same(ours, pytorch)
            assert ours[0].stride() == pytorch[0].stride() and ours[1].stride() == pytorch[1].stride()


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for (shape, groups, layout), act in itertools.product(SHAPES, ("relu", "silu")):
            case = Case(shape, layout, stats=False)
            same(*(case.run(f, needs=(True, True, True, False)) for f in reversed(pair(act, groups))))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("act", ("relu", "silu", "identity"))
def test_every_combination_of_gradients(needs, act):
    for layout in (CONTIGUOUS,) if CRASHES and not needs[0] else (CONTIGUOUS, LAST):
        case = Case((3, 6, 6, 7), layout, stats=False)
        same(*(case.run(f, needs=(*needs, False)) for f in reversed(pair(act, 3))))


@pytest.mark.parametrize("dtype", DTYPES[1:])  # float64 is what they are compared with
@pytest.mark.parametrize("act", ("relu", "silu"))
def test_dtypes(dtype, act):
    for layout, params in itertools.product((CONTIGUOUS, LAST), (dtype, torch.float32)):
        if params != dtype and dtype.itemsize != 2:
            continue
        case = Case((4, 12, 19, 8), layout, dtype, stats=False, params=params)
        needs = (True, True, True, False)
        pytorch, ours = pair(act, 4)
        as_good(case.run(ours, needs=needs), case.run(pytorch, needs=needs), case.run(pytorch, torch.float64, needs=needs))


def test_numbers_that_are_not_finite_and_large_means():
    for layout in (CONTIGUOUS, LAST):
        x = torch.randn(2, 4, 7, 6).contiguous(memory_format=layout)
        x[0, 1, 2, 3] = float("nan")
        x[1, 3, 0, 0] = float("inf")
        torch.testing.assert_close(ops.group_norm_act(x, 2, None, None, 1e-5, True, "relu", []), F.relu(F.group_norm(x, 2)), equal_nan=True)
        far = (torch.randn(2, 4, 50, 60, dtype=torch.float64) * 1e-2 + 100).contiguous(memory_format=layout)
        exact = F.silu(F.group_norm(far, 2))
        ours, theirs = ops.group_norm_act(far.float(), 2, None, None, 1e-5, True, "silu", []), F.silu(F.group_norm(far.float(), 2))
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_unusual_inputs():
    views = [((2, 6, 9, 4), lambda t: t.transpose(2, 3)), ((2, 6, 10, 8), lambda t: t[:, :, ::2]), ((2, 1, 9, 4), lambda t: t.expand(2, 6, 9, 4)), ((6, 2, 35), lambda t: t.transpose(0, 1))]
    for shape, view in views:
        x, results = torch.randn(shape, dtype=torch.float64, requires_grad=True), []
        for f in pair("silu", 3):
            out = f(view(x), None, None, None, None, None)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), x)])
        same(*reversed(results))
        assert results[0][0].stride() == results[1][0].stride()
    empty = torch.randn(0, 6, 4, 4, requires_grad=True)
    assert ops.group_norm_act(empty, 3, None, None, 1e-5, True, "relu", []).shape == empty.shape
    for wrong in (lambda f: f(torch.randn(2, 6, 4), 4), lambda f: f(torch.randn(2, 6, 4), 3, torch.ones(5))):
        errors = []
        for f in (lambda x, g, w=None: ops.group_norm_act(x, g, w, None, 1e-5, True, "relu", []), F.group_norm):
            with pytest.raises((RuntimeError, ValueError)) as e:
                wrong(f)
            errors.append(str(e.value).splitlines()[0])
        assert errors[0] == errors[1]
    with torch.no_grad():
        assert ops.group_norm_act(torch.randn(2, 6, 4), 3, None, None, 1e-5, True, "relu", []).grad_fn is None
    meta = ops.group_norm_act(torch.randn(2, 6, 4, 4, device="meta", requires_grad=True), 3, None, None, 1e-5, True, "relu", [])
    meta.sum().backward()
    assert meta.shape == (2, 6, 4, 4)


def test_gradcheck():
    """Second derivatives too."""
    for layout, size in itertools.product((CONTIGUOUS, LAST), ((4, 3), (8, 4))):  # small planes are two operators
        x = torch.randn(1, 4, *size, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
        w, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        for inputs in ((x, w, b), (x, None, None), (x.detach(), w, b), (x, w.detach(), b)):
            if CRASHES and layout == LAST and not inputs[0].requires_grad:
                continue
            f = lambda x, w, b: ops.group_norm_act(x, 2, w, b, 1e-5, True, "silu", [])  # noqa: E731
            assert torch.autograd.gradcheck(f, inputs)
            assert torch.autograd.gradgradcheck(f, inputs)


def both(f):
    """What f gives of our operator and of PyTorch's, under silu."""
    ours = f(lambda x, w=None, b=None: ops.group_norm_act(x, 2, w, b, 1e-5, True, "silu", []))
    theirs = f(lambda x, w=None, b=None: F.silu(F.group_norm(x, 2, w, b)))
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("size", (3, 8))
def test_operands_made_from_one_another(size):
    """A weight that depends on the input, or on the bias: gradients of gradients follow each path once, and hooks run once."""
    start = torch.randn(2, 4, size, size, dtype=torch.float64)
    numbers = torch.rand(4, dtype=torch.float64) + 0.5

    def leaf(t):
        return t.clone().requires_grad_()

    def twice(out, *leaves):
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    def from_input(f):
        x = leaf(start)
        return twice(f(x, 1 + x.mean((0, 2, 3)), x.amax((0, 2, 3))), x)

    def from_weight(f):
        x, w = leaf(start), leaf(numbers)
        return twice(f(x, w, w * 0.5), x, w)

    def the_same(f):
        x, w = leaf(start), leaf(numbers)
        return twice(f(x, w, w), x, w)

    def hooks(f):
        x, w = leaf(start), leaf(numbers)
        y = x * 1.0
        y.retain_grad()
        for t in (x, w, y):
            t.register_hook(lambda g: g * 2)
        f(y, w).square().sum().backward(create_graph=True)
        return [x.grad, w.grad, y.grad]

    for case in (from_input, from_weight, the_same, hooks):
        both(case)


def test_gradients_in_any_memory():
    """Somebody else's gradient is not written to; one in another layout serves as memory."""
    x = torch.randn(3, 4, 8, 8)
    for layout, other in itertools.product((CONTIGUOUS, LAST), repeat=2):
        grad = torch.randn(3, 4, 8, 8).contiguous(memory_format=other)

        def held(f, layout=layout, grad=grad):
            leaf = x.contiguous(memory_format=layout).requires_grad_()
            out, seen = f(leaf), []
            out.register_hook(lambda g: seen.append(g) or None)
            before = grad.clone()
            given = torch.autograd.grad(out, leaf, grad, retain_graph=True)
            again = torch.autograd.grad((out * 3.0).sum() + out.square().sum(), leaf, retain_graph=True)
            assert torch.equal(grad, before)
            return [*given, *again, *seen]

        both(held)


@pytest.mark.parametrize("layout", (CONTIGUOUS, LAST))
def test_small_planes_and_symbolic_sizes(layout):
    from torch.fx.experimental.proxy_tensor import make_fx

    for shape in ((64, 8, 2, 2), (32, 8, 4, 4), (300, 8), (2, 8, 5, 7)):
        case = Case(shape, layout if len(shape) == 4 else CONTIGUOUS, stats=False)
        same(*(case.run(f, needs=(True, True, True, False)) for f in reversed(pair("silu", 4, 1))))
    x = torch.randn(3, 8, 6, 7).contiguous(memory_format=layout)
    graph = make_fx(lambda t: ops.group_norm_act(t, 4, None, None, 1e-5, True, "relu", []), tracing_mode="symbolic")(x)
    torch.testing.assert_close(graph(torch.cat([x, x])), F.relu(F.group_norm(torch.cat([x, x]), 4)))


def test_no_variance():
    flat = torch.ones(2, 4, 8, 8)
    assert ops.group_norm_act(flat, 2, None, None, 0.0, True, "identity", []).isnan().equal(F.group_norm(flat, 2, eps=0.0).isnan())


@pytest.mark.parametrize("act", ("relu", "silu"))
def test_keeps_the_input_alone(act):
    torch.manual_seed(0)
    x, w = torch.randn(8, 16, 32, 32, requires_grad=True), torch.randn(16, 16, 3, 3, requires_grad=True)
    unit = x.numel() * 4

    def block(recompute):
        args, f = ACTS[act]
        y = ops.conv2d(x, w, None, [1, 1], [1, 1])
        z = ops.group_norm_act(y, 4, None, None, 1e-5, True, act, args, recompute) if recompute is not None else f(F.group_norm(y, 4))
        return ops.conv2d(z, w, None, [1, 1], [1, 1]).mean()

    assert live_bytes(lambda: block(None)) > 1.9 * unit
    assert live_bytes(lambda: block(0)) < 2.1 * unit  # the next convolution keeps its input
    assert live_bytes(lambda: block(1)) < 1.1 * unit
    grads = [torch.autograd.grad(block(r), (x, w)) for r in (None, 0, 1)]
    for g in grads[1:]:
        for a, e in zip(g, grads[0]):
            torch.testing.assert_close(a, e)


class Block(torch.nn.Module):
    def __init__(self, act, affine=True, inplace=False):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(4, 8, affine=affine)
        self.act = act(inplace)
        self.conv2 = torch.nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.conv2(self.act(self.norm(self.conv1(x))))


def steps(module, x):
    results = []
    for _ in range(4):
        module.zero_grad()
        y = module(x)
        y.square().sum().backward()
        results += [y.detach(), *(p.grad.clone() for p in module.parameters())]
    return results


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("level", ["ops", "regions"])
@pytest.mark.parametrize("act,affine,inplace", [(torch.nn.ReLU, True, True), (torch.nn.SiLU, True, False), (torch.nn.SiLU, False, True)])
def test_rewritten_module(act, affine, inplace, level, traced):
    torch.manual_seed(0)
    net, x = Block(act, affine, inplace).double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)
    pytorch = torch.jit.trace(net, x) if traced else torch.jit.script(net)
    new = tsmem.rewrite(pytorch, level=level)
    assert "tsmem::group_norm_act" in str(new.inlined_graph)
    same(steps(new, x), steps(pytorch, x))


class Shared(Block):
    """The norm's result is read twice."""

    def forward(self, x):
        n = self.norm(self.conv1(x))
        return self.conv2(self.act(n) + n.mean())


class Between(Block):
    """Something lies between the norm and its activation."""

    def forward(self, x):
        return self.conv2(self.act(self.norm(self.conv1(x)) * 2.0))


@pytest.mark.parametrize("kind", (Shared, Between))
def test_what_is_left(kind):
    torch.manual_seed(0)
    net, x = kind(torch.nn.SiLU).double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)
    pytorch = torch.jit.script(net)
    new = tsmem.rewrite(pytorch)
    assert "tsmem::group_norm_act" not in str(new.inlined_graph)
    same(steps(new, x), steps(pytorch, x))


def test_compiled():
    torch.manual_seed(0)
    net, x = Block(torch.nn.SiLU).double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)
    expected = steps(net, x)
    same(steps(torch.compile(net, backend="tsmem"), x), expected)
