"""linear_cross_entropy: against a linear layer and its loss by PyTorch, what it keeps, and the step's peak."""
import itertools

import allocator
import pytest
import torch
import torch.nn.functional as F
from op_checks import calls, live_bytes, run, saved

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
WHOLE = (0, None, None, 1)


pytestmark = pytest.mark.usefixtures("one_thread")


def ours(x, weight, bias, target, class_weight=None, reduction="mean", ignored=-100, smoothing=0.0, sliced=WHOLE, arranged=("", None, 0, 0)):
    return torch.ops.tsmem.linear_cross_entropy(x, weight, bias, target, class_weight, REDUCTIONS[reduction], ignored, smoothing, *sliced, *arranged)


def pytorchs(x, weight, bias, target, class_weight=None, reduction="mean", ignored=-100):
    return F.cross_entropy(F.linear(x, weight, bias), target, class_weight, reduction=reduction, ignore_index=ignored)


def given(rows=300, features=6, classes=40, dtype=torch.float64, ignored=-100):
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for size in ((rows, features), (classes, features), (classes,)))
    target = torch.randint(classes, (rows,), generator=g)
    target[1::5] = ignored
    return x, weight, bias, target


def close(got, want, dtype, factor=64):
    eps = torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape and g.stride() == w.stride()
        torch.testing.assert_close(g, w, rtol=factor * eps, atol=factor * eps * max(1.0, float(w.abs().max())), equal_nan=True)


def runs_in_blocks(loss):
    """Or by the layer and the loss, one after the other."""
    return "LinearCrossEntropy" in loss.grad_fn.name()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_equals_pytorch(reduction, dtype):
    for weighted, ignored, biased, wants in itertools.product((False, True), (-100, 3), (False, True), itertools.product((False, True), repeat=2)):
        x, weight, bias, target = given(dtype=dtype, ignored=ignored)
        if not any(wants):
            continue
        x, weight = (t.detach().requires_grad_(w) for t, w in zip((x, weight), wants))
        bias = bias if biased else None
        class_weight = torch.linspace(0.2, 1.3, 40, dtype=dtype) if weighted else None
        leaves = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
        both = []
        for f in (ours, pytorchs):
            loss = f(x, weight, bias, target, class_weight, reduction, ignored)
            both.append([loss.detach(), *torch.autograd.grad(loss * 3, leaves)])
        assert runs_in_blocks(ours(x, weight, bias, target, class_weight, reduction, ignored))
        close(*both, dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_sixteen_bits(dtype):
    """No further from float64 than PyTorch's own, which rounds the logits and their log_softmax."""
    x, weight, bias, target = given(dtype=dtype)
    leaves = (x, weight, bias)
    results = []
    for f in (ours, pytorchs):
        loss = f(*leaves, target)
        results.append([loss.detach(), *torch.autograd.grad(loss * 100, leaves)])
    double = [t.detach().double().requires_grad_() for t in leaves]
    loss = pytorchs(*double, target)
    exact = [loss.detach(), *torch.autograd.grad(loss * 100, double)]
    for got, theirs, e in zip(*results, exact):
        assert got.dtype == theirs.dtype == dtype
        off = lambda t: torch.linalg.vector_norm(t.double() - e)  # noqa: E731
        assert off(got) <= off(theirs) + 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(e)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_logits_cast_to_float32(dtype):
    x, weight, bias, target = given(dtype=dtype)
    leaves = (x, weight, bias)
    class_weight = torch.linspace(0.2, 1.3, 40)
    loss = torch.ops.tsmem.linear_cross_entropy(*leaves, target, class_weight, dtype=torch.float32)
    assert runs_in_blocks(loss) == (dtype != torch.float64)
    want = F.cross_entropy(F.linear(*leaves).float(), target, class_weight)
    for got, expected in zip([loss.detach(), *torch.autograd.grad(loss, leaves)], [want.detach(), *torch.autograd.grad(want, leaves)]):
        assert got.dtype == expected.dtype
        eps = max(torch.finfo(got.dtype).eps, 2.0**-23)
        assert torch.linalg.vector_norm(got.double() - expected.double()) <= 8 * eps * torch.linalg.vector_norm(expected.double())


def test_many_rows_in_sixteen_bits_do_not_overflow():
    rows = 40_000
    x, weight = torch.full((rows, 2), 4.0, dtype=torch.float16, requires_grad=True), torch.zeros(3, 2, dtype=torch.float16, requires_grad=True)
    loss = ours(x, weight, None, torch.zeros(rows, dtype=torch.long))
    assert runs_in_blocks(loss)
    (g,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(g[0].float(), torch.full((2,), -4 * 2 / 3), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_large_inputs_in_sixteen_bits(dtype):
    """A sum over rows that float16 has no number for: the loss's gradient brings it back."""
    x, weight = torch.full((256, 2), 300.0, dtype=torch.float16, requires_grad=True), torch.zeros(400, 2, dtype=torch.float16, requires_grad=True)
    target = torch.zeros(256, dtype=torch.long)
    loss = torch.ops.tsmem.linear_cross_entropy(x, weight, None, target, dtype=dtype)
    assert runs_in_blocks(loss)
    (g,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(g[0].float(), torch.full((2,), -300 * 399 / 400), rtol=2e-3, atol=0)


@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("scale", (1e5, 1.0, 1e-4, 1e-6))
def test_class_weights_of_any_size(scale, reduction):
    """The gradients in float16 are as exact with small or large weights as with others."""
    x, weight, _, target = given(512, 32, 200, torch.float16)
    class_weight = torch.linspace(0.2, 1.3, 200, dtype=torch.float64) * scale
    out = 1024.0 if reduction == "mean" else 1 / scale
    loss = torch.ops.tsmem.linear_cross_entropy(x, weight, None, target, class_weight.float(), REDUCTIONS[reduction], dtype=torch.float32)
    assert runs_in_blocks(loss)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = torch.autograd.grad(pytorchs(*exact, None, target, class_weight, reduction) * out, exact)
    for g, w in zip(torch.autograd.grad(loss * out, (x, weight)), want, strict=True):
        assert torch.linalg.vector_norm(g.double() - w) <= 2e-3 * torch.linalg.vector_norm(w)


def test_derivatives():
    x, weight, bias, target = given(24, 3, 9)
    for reduction in ("mean", "sum"):
        assert torch.autograd.gradcheck(lambda *t: ours(*t, target, None, reduction), (x, weight, bias))
        for inputs in ((x, weight, bias), (x, weight.detach(), bias.detach()), (x, weight.detach(), bias)):
            assert torch.autograd.gradgradcheck(lambda *t: ours(*t, target, None, reduction), inputs)


def test_second_derivatives():
    """Where the operands are there anyway: leaves, and what backward makes again. Else they are refused by name."""
    x, weight, _, target = given(600, 16, 800)
    classes = torch.rand(800, dtype=torch.float64)

    def twice(norm, loss, x):
        x, w, scale = (t.detach().clone().requires_grad_() for t in (x, weight, torch.ones(16, dtype=torch.float64)))
        first = torch.autograd.grad(loss(norm(x, scale), w, None, target, classes), (x, w, scale), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w, scale))]

    o = torch.ops.tsmem
    own = twice(lambda x, s: o.layer_norm(x * 1.0, [16], s, None, 1e-5, True, 1), ours, x)
    close(own, twice(lambda x, s: F.layer_norm(x, [16], s), pytorchs, x), torch.float64)
    for of in ((x * 1.0,), (x.detach() * 1.0, weight)):  # with a gradient that needs one, and without
        with pytest.raises(RuntimeError, match="tsmem::linear_cross_entropy: second derivatives are not supported"):
            loss = ours(of[0], of[-1] if len(of) > 1 else weight.detach(), None, target)
            torch.autograd.grad(torch.autograd.grad(loss, of[-1:], create_graph=True)[0].sum(), of[-1:], allow_unused=True)


def test_backward_twice():
    """The first leaves what is kept as it was, the last may take it."""
    leaves, target = given()[:3], given()[3]
    loss = ours(*leaves, target)
    first = torch.autograd.grad(loss * 2, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    close([2 * g for g in second], first, torch.float64)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


ARRANGEMENTS = {
    "view": (lambda t: t.view(-1, 40), ("view", [-1, 40], 0, 0), 1), "reshape": (lambda t: t.reshape(t.numel() // 40, 40), None, 1),
    "flatten": (lambda t: t.flatten(0, 1), ("flatten", None, 0, 1), 1), "flatten from the end": (lambda t: t.flatten(-3, -2), ("flatten", None, -3, -2), 1),
    "transpose": (lambda t: t.transpose(1, 2), ("transpose", None, 1, 2), 2), "transpose from the end": (lambda t: t.transpose(-1, -2), ("transpose", None, -1, -2), 2),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_what_lies_between(name):
    arrange, told, dims = ARRANGEMENTS[name]
    x, weight, bias, target = given(10 * 30)
    x = x.detach().view(10, 30, 6).requires_grad_()
    for sliced, take in ((WHOLE, lambda t: t), ((1, None, -1, 1), lambda t: t[:, :-1]), ((-2, 1, None, 2), lambda t: t[..., 1::2, :])):
        labels = take(target.view(10, 30, 1).expand(10, 30, 1))[..., 0]
        labels = labels if dims == 2 else labels.flatten()
        this = told or ("reshape", [labels.numel(), 40], 0, 0)
        if this[0] == "view" and sliced != WHOLE:
            this = ("reshape", *this[1:])
        leaves = (x, weight, bias)
        f = lambda: ours(*leaves, labels, sliced=sliced, arranged=this)  # noqa: B023, E731
        g = lambda: F.cross_entropy(arrange(take(F.linear(*leaves)).contiguous()), labels)  # noqa: B023, E731
        assert runs_in_blocks(f())
        close(*[[loss.detach(), *torch.autograd.grad(loss, leaves)] for loss in (f(), g())], torch.float64)


def test_views_that_pytorch_refuses():
    """Rows of a slice that don't follow each other in memory, and two sizes to be found: its error; one that it takes: in blocks."""
    x, weight, bias, target = given(10 * 30)
    x, target = x.detach().view(10, 30, 6).requires_grad_(), target.view(10, 30)
    view = ("view", [-1, 40], 0, 0)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        ours(x, weight, bias, target[:, :-1].flatten(), sliced=(1, None, -1, 1), arranged=view)
    with pytest.raises(RuntimeError, match="only one dimension can be inferred"):
        ours(x, weight, bias, target.flatten(), arranged=("view", [-1, -1], 0, 0))
    for part, labels, sliced in ((x, target[1:], (0, 1, None, 1)), (x[:1], target[:1, :-1], (1, None, -1, 1)), (x, target, (1, 0, 30, 1))):
        loss = ours(part, weight, bias, labels.flatten(), sliced=sliced, arranged=view)
        logits = F.linear(part, weight, bias)
        want = F.cross_entropy((logits[1:] if sliced[0] == 0 else logits[:, : sliced[2]]).view(-1, 40), labels.flatten())
        assert runs_in_blocks(loss)
        close(*[[t.detach(), *torch.autograd.grad(t, (x, weight, bias))] for t in (loss, want)], torch.float64)


def test_targets_that_are_no_class():
    x, weight, bias, target = given()
    target[3] = 40
    for class_weight in (None, torch.ones(40, dtype=torch.float64)):
        with pytest.raises(IndexError, match="Target 40 is out of bounds"):
            ours(x, weight, bias, target, class_weight)


def test_what_it_keeps():
    """The gradients, where they are smaller than the logits; a frozen weight's not."""
    x, weight, bias, target = given(512, 8, 64, torch.float32)
    size = lambda *t: sum(a.numel() * 4 for a in t)  # noqa: E731
    small = 64 + 512  # the loss, the number of rows, and which are ignored
    assert live_bytes(lambda: ours(x, weight, bias, target)) <= size(x, weight, bias) + small
    assert live_bytes(lambda: ours(x, weight.detach(), None, target)) <= size(x) + small
    assert live_bytes(lambda: ours(x.detach(), weight, None, target)) <= size(weight) + small
    few = ours(x[:4], weight, bias, target[:4])  # fewer rows than features: the logits are smaller than the weight
    assert not runs_in_blocks(few)
    with torch.no_grad():
        assert saved(lambda: ours(x, weight, bias, target))[0] == []


def test_peak():
    """The logits are never there as a whole: PyTorch's step has three tensors of their size at its peak."""
    rows, features, classes = 4096, 16, 512

    def peak(loss):
        x, weight, _, target = given(rows, features, classes, torch.float32)
        return allocator.most_held(lambda: loss(x, weight, None, target).backward()) / (rows * classes * 4)

    assert peak(ours) < 0.4 < 2.8 < peak(pytorchs)


def test_what_is_pytorchs():
    """No reduction, smoothed labels, probabilities, one row, nothing, all ignored, hooks, other shapes, errors: PyTorch's result or error."""
    x, weight, bias, target = given()
    leaves = (x, weight, bias)
    pairs = [
        (lambda: ours(*leaves, target, None, "none"), lambda: pytorchs(*leaves, target, None, "none")),
        (lambda: ours(*leaves, target, smoothing=0.1), lambda: F.cross_entropy(F.linear(*leaves), target, label_smoothing=0.1)),
        (lambda: ours(*leaves, torch.full((300, 40), 1 / 40, dtype=torch.float64)), lambda: pytorchs(*leaves, torch.full((300, 40), 1 / 40, dtype=torch.float64))),
        (lambda: ours(x[0], weight, bias, target[0]), lambda: pytorchs(x[0], weight, bias, target[0])),
        (lambda: ours(*leaves, torch.full_like(target, -100)), lambda: pytorchs(*leaves, torch.full_like(target, -100))),
        (lambda: ours(*leaves, torch.full_like(target, -100), None, "sum"), lambda: pytorchs(*leaves, torch.full_like(target, -100), None, "sum")),
    ]
    for f, g in pairs:
        close(*[[loss.detach(), *torch.autograd.grad(loss.sum(), leaves)] for loss in (f(), g())], torch.float64)
    # Classes in the second dimension of three, and a slice of the classes: not rows.
    cube = torch.randn(20, 40, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(40, (20, 40))
    loss, want = ours(cube, weight, None, labels), F.cross_entropy(F.linear(cube, weight), labels)
    close(*[[t.detach(), *torch.autograd.grad(t, (cube, weight))] for t in (loss, want)], torch.float64)
    first = target.remainder(20)
    loss, want = ours(*leaves, first, sliced=(1, 0, 20, 1)), F.cross_entropy(F.linear(*leaves)[:, :20], first)
    close(*[[t.detach(), *torch.autograd.grad(t, leaves)] for t in (loss, want)], torch.float64)
    for labels in (target + 39, target[:3], target.int()):
        with pytest.raises(Exception) as theirs:
            F.cross_entropy(F.linear(*leaves), labels)
        with pytest.raises(theirs.type) as own:
            ours(*leaves, labels)
        assert str(own.value) == str(theirs.value)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = ours(*leaves, target)
    assert kept and not runs_in_blocks(loss)


def test_no_class_has_weight():
    """Not ignored, but of weight 0: the mean is 0 / 0."""
    x, weight, bias, target = given()
    nothing = torch.zeros(40, dtype=torch.float64)
    for loss in (ours(x, weight, bias, target, nothing), pytorchs(x, weight, bias, target, nothing)):
        assert loss.isnan()


def test_scripted_and_autocast():
    source = "def f(x, w, b: Optional[Tensor], t):\n    return {} * 2\n"
    op = torch.jit.CompilationUnit(source.format("torch.ops.tsmem.linear_cross_entropy(x, w, b, t)")).f
    pytorch = torch.jit.CompilationUnit(source.format("torch._C._nn.cross_entropy_loss(torch._C._nn.linear(x, w, b), t)")).f
    x, weight, bias, target = given()
    for got in calls(lambda t: op(t, weight, bias, target), x):
        close(got, run(lambda t: pytorch(t, weight, bias, target), x), torch.float64)
    x, weight, bias, target = given(dtype=torch.float32)
    leaves = (x, weight, bias)
    for f in (op, ours):
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = f(*leaves, target), (pytorch if f is op else pytorchs)(*leaves, target)
            got, want = ([loss.detach(), *torch.autograd.grad(loss, leaves)] for loss in losses)
            close(got, want, torch.bfloat16, 8)


def test_meta_and_vmap():
    x, weight, bias, target = (t.detach().to("meta") for t in given())
    x.requires_grad_()
    loss = ours(x, weight, bias, target)
    assert loss.shape == () and torch.autograd.grad(loss, x)[0].shape == x.shape
    xs, ts = torch.randn(4, 6, 5), torch.randint(7, (4, 6))
    weight = torch.randn(7, 5)
    torch.testing.assert_close(torch.vmap(lambda x, t: ours(x, weight, None, t))(xs, ts), torch.stack([pytorchs(x, weight, None, t) for x, t in zip(xs, ts)]))


def test_sizes():
    x, weight = torch.zeros(2, 3, 6), torch.zeros(40, 6)
    assert torch.ops.tsmem.linear_output_size(x, weight) == [2, 3, 40]
    assert [torch.ops.tsmem.linear_output_size.dim(x, weight, d) for d in (0, -1)] == [2, 40]


@pytest.mark.parametrize("upstream", (float("inf"), float("-inf"), float("nan")))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_rows_that_are_ignored_have_no_gradient(reduction, upstream):
    """Whatever the loss's gradient is: of a batch without targets, divided by their number, it is no number."""
    x, weight, bias, target = given()
    for targets in (target, torch.full_like(target, -100), target[:0]):
        rows = x.detach()[: targets.numel()].requires_grad_()
        results = [torch.autograd.grad(f(rows, weight, bias, targets, reduction=reduction) * upstream, (rows, weight, bias)) for f in (ours, pytorchs)]
        for got, want in zip(*results):
            assert torch.equal(got.isfinite(), want.isfinite()) and torch.equal(got[got.isfinite()], want[want.isfinite()])
        assert not results[0][0][targets == -100].any() and (targets is target or not results[0][1].any())
