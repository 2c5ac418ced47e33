"""Elementwise operators, casts, copies and look-ups: equal to PyTorch's, and recomputed from what is kept anyway."""

import itertools
import pathlib
import re

import pytest
import torch
from op_checks import DTYPES, assert_equal, calls, channels_last, live_bytes, run, saved

pytestmark = pytest.mark.usefixtures("ops")

F64 = torch.float64
INDEX = torch.tensor([3, 0, 3, 1])
MASK = torch.tensor([True, False, True, True, False])


def data(*shape, dtype=F64, low=-2.0, high=2.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=g, dtype=F64) * (high - low) + low).to(dtype)


def positive(*shape, seed=0):
    return data(*shape, low=0.5, high=2.5, seed=seed)


# Name, and tensors and other arguments of several calls.
X, Y = data(4, 6, 5), data(4, 6, 5, seed=1)
P, Q = positive(4, 6, 5), positive(4, 6, 5, seed=1)
CASES = {
    **{name: [(X,)] for name in ("abs", "neg", "square", "exp", "exp2", "expm1", "sin", "cos", "tan", "sinh", "cosh", "atan", "sinc", "erf", "erfc", "sigmoid", "tanh", "nan_to_num")},
    **{name: [(P,)] for name in ("sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "log1p")},
    "add.Scalar": [(X, 2), (X, 0.5, 3)],
    "sub.Tensor": [(X, Y), (X, Y, 3), (X, Y[:, :1]), (X[:1], Y[0, 0])],
    "sub.Scalar": [(X, 2), (X, 0.5, 3)],
    "rsub.Tensor": [(X, Y), (X[:, :1], Y, 2)],
    "rsub.Scalar": [(X, 1), (X, 0.5, 2)],
    "mul.Scalar": [(X, 2), (X, 0.3)],
    "div.Tensor": [(X, P), (X, P[:, :1]), (X[0, 0], P), (X, P[0, 0, 0])],
    "div.Scalar": [(X, 2), (X, 0.3)],
    "pow.Tensor_Scalar": [(X, 2), (X, 3), (P, 0.5), (P, -1.5), (X, 0), (X, 1)],
    "pow.Tensor_Tensor": [(P, Y), (P, Y[:, :1])],
    "pow.Scalar": [(2.0, Y), (0.7, Y)],
    "fmod.Scalar": [(X, 0.75), (X, -1)],
    "remainder.Scalar": [(X, 0.75), (X, -1)],
    "clamp": [(X, -0.5, 0.5), (X, None, 0.5), (X, -0.5, None)],
    "clamp_min": [(X, 0.1)],
    "clamp_max": [(X, 0.1)],
    "minimum": [(X, Y), (X, Y[:, :1])],
    "maximum": [(X, Y), (X[0], Y)],
    "min.other": [(X, Y)],
    "max.other": [(X, Y)],
    "addcmul": [(X, Y, P), (X[0, 0], P[0, 0], Y, 2.0)],
    "addcdiv": [(X, Y, P), (X[0, 0], P[0, 0], Q, 2.0)],
    "lerp.Scalar": [(X, Y, 0.3), (X[0], Y, 2)],
    "lerp.Tensor": [(X, Y, P), (X, Y[:, :1], P[0, 0])],
    "atan2": [(X, Y), (X, Y[:, :1])],
    "hypot": [(X, Y), (X[0, 0], Y)],
    "logaddexp": [(X, Y), (50 * X, Y[:, :1])],
    "logaddexp2": [(X, Y), (50 * X, Y[:, :1])],
    "log_sigmoid": [(X,), (50 * X,)],
    "hardshrink": [(X, 0.5), (X, 1)],
    "softshrink": [(X, 0.5), (X, 1)],
    "where.self": [(MASK, X, Y), (X > 0, X[:, :1], Y[0, 0])],
    "where.ScalarSelf": [(MASK, 2.0, Y)],
    "where.ScalarOther": [(X > 0, X, -1.0)],
    "masked_fill.Scalar": [(X, MASK, 3.0), (X[:, :1], Y > 0, float("-inf"))],
    "masked_fill.Tensor": [(X, MASK, Y[0, 0, 0])],
    "tril": [(X,), (X, 1)],
    "triu": [(X,), (X, -1)],
    "to.dtype": [(X, torch.float32), (X, F64)],
    "_to_copy": [(X,), (X, torch.float32)],
    "type_as": [(X, Y.float()), (X, Y)],
    "clone": [(X,), (X, torch.contiguous_format)],
    "rot90": [(X,), (X, 3, [0, 2])],
    "flip": [(X, [0, 2])],
    "stack": [([X, Y], 1), ([X, Y, P], -1)],
    "hstack": [([X, Y],), ([X[0, 0], Y[0, 0], P[0, 0]],)],
    "vstack": [([X, Y],), ([X[0, 0], Y[0, 0]],)],
    "dstack": [([X, Y],), ([X[0, 0], Y[0, 0]],)],
    "column_stack": [([X, Y],), ([X[0, 0], Y[0, 0]],)],
    "tile": [(X, [2, 1, 1, 3]), (X, [3])],
    "repeat": [(X, [2, 1, 1, 3])],
    "repeat_interleave.self_int": [(X, 3, 1), (X, 2)],
    "pixel_shuffle": [(data(2, 8, 3, 4), 2)],
    "pixel_unshuffle": [(data(2, 2, 4, 6), 2)],
    "constant_pad_nd": [(X, [1, 2]), (X, [1, 2, 0, 3], 1.5), (X, [-1, 1])],
    "im2col": [(data(2, 3, 5, 6), [3, 2], [1, 1], [1, 0], [2, 1])],
    "index.Tensor": [(X, [INDEX]), (X, [None, INDEX]), (X, [INDEX[:, None], INDEX]), (X, [X[..., 0] > 0])],
    "index.Tensor_hacked_twin": [(X, [INDEX]), (X, [INDEX, INDEX])],
    "index_select": [(X, 1, INDEX)],
    "gather": [(X, 1, torch.tensor([[[1, 2, 0], [3, 3, 5]]]))],
    "embedding": [(data(7, 5), INDEX), (data(7, 5), INDEX[:, None], 3)],
    "upsample_nearest1d.vec": [(data(2, 3, 5), None, [2.0])],
    "upsample_nearest2d.vec": [(data(2, 3, 5, 4), [10, 9], None)],
    "upsample_nearest3d.vec": [(data(2, 3, 5, 4, 2), None, [2.0, 2.0, 2.0])],
    "upsample_linear1d.vec": [(data(2, 3, 5), None, False, [2.0])],
    "upsample_bilinear2d.vec": [(data(2, 3, 5, 4), [10, 9], True, None)],
    "upsample_bicubic2d.vec": [(data(2, 3, 5, 4), [10, 9], True, None)],
    "upsample_trilinear3d.vec": [(data(2, 3, 5, 4, 2), None, False, [2.0, 2.0, 2.0])],
    "grid_sampler": [
        (data(2, 3, 5, 4), data(2, 3, 6, 2, low=-1.2, high=1.2, seed=1), 0, 0, False),
        (data(2, 3, 5, 4), data(2, 3, 6, 2, low=-1.2, high=1.2, seed=1), 2, 2, True),
        (data(1, 2, 3, 5, 4), data(1, 2, 3, 6, 3, low=-1.2, high=1.2, seed=1), 0, 1, False),
    ],
    "amax": [(X, [1], True), (X, [0, -1], False), (X,)],
    "amin": [(X, [2]), (X, [], True)],
    "var.dim": [(X, [1], True, True), (X, [0, -1], False, False), (X, None, True, False)],
    "var.correction": [(X, [2], 0, True), (X, [1, 2])],
    "std.dim": [(X, [1], True, True), (X, [0, -1], False, False)],
    "std.correction": [(X, [2], 0, True), (X, None, 1.5)],
    "norm.ScalarOpt_dim": [(X, 2, [1], True), (X, 2, [0, -1]), (X, None, [2]), (X, 3, [1]), (X, 1, [1], True)],
    "linalg_vector_norm": [(X,), (X, 2, [1, 2], True), (X, 1, [1]), (X, float("inf"), [1])],
}
NAMES = sorted(CASES)
SECOND_OPERATORS = {"pow.Tensor_Scalar": "pow_.Scalar", "pow.Tensor_Tensor": "pow_.Tensor"}
ALL = pytest.mark.parametrize("name", NAMES)


def op(library, name):
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library), base), overload or "default")


def arguments_of(name):
    return [a.name for a in op("tsmem", name)._schema.arguments]


def ours(name, recompute=1, in_place=0):
    names, f = arguments_of(name), op("tsmem", name)
    last = {"recompute": recompute, **({"in_place": in_place} if "in_place" in names else {})}
    return lambda *a: f(*a, **last)


def pytorch(name):
    """aten's, called by position as ours are: what is given by keyword alone there is not here."""
    if name == "index.Tensor_hacked_twin":
        return lambda x, i: torch.ops.aten.index.Tensor(x, i)
    f = op("aten", name)
    positional = [a.name for a in f._schema.arguments if not a.kwarg_only]
    keyword = [a.name for a in f._schema.arguments if a.kwarg_only]
    return lambda *a: f(*a[: len(positional)], **dict(zip(keyword, a[len(positional) :])))


def tensors(args, grads=None):
    """The arguments with fresh leaves, and these."""
    leaves = []

    def leaf(x):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        wanted = True if grads is None else grads[len(leaves) % len(grads)]
        leaves.append(x.detach().clone(memory_format=torch.preserve_format).requires_grad_(wanted))
        return leaves[-1]

    return [[leaf(t) for t in a] if isinstance(a, list) and a and isinstance(a[0], torch.Tensor) else leaf(a) for a in args], leaves


def outcome(f, args, grads=None, cotangent=None):
    given, leaves = tensors(args, grads)
    y = f(*given)
    wanted = [x for x in leaves if x.requires_grad]
    if not y.requires_grad:
        return [y]
    g = data(*y.shape, seed=5).to(y.dtype) if cotangent is None else cotangent
    return [y.detach(), *torch.autograd.grad(y, wanted, g, allow_unused=True)]


def assert_close(actual, expected, rtol=1e-12):
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected)):
        assert (a is None) == (e is None)
        if a is not None:
            assert a.dtype == e.dtype and a.shape == e.shape
            torch.testing.assert_close(a, e, rtol=rtol if e.dtype == F64 else None, atol=rtol if e.dtype == F64 else None, equal_nan=True)
    assert actual[0].stride() == expected[0].stride()


def test_every_operator_has_a_case():
    """The rows of ops/cheap_table.h."""
    table = (pathlib.Path(__file__).parents[2] / "ops" / "cheap_table.h").read_text()
    rows = re.findall(r"""^    \w+\("([\w.]+)\(""", table, re.MULTILINE)
    assert len(rows) > 50
    assert not set(rows) - set(CASES)


@ALL
@pytest.mark.parametrize("recompute", [0, 1])
def test_equals_pytorch(name, recompute):
    for args in CASES[name]:
        count = len(tensors(args)[1])
        for grads in itertools.product([True, False], repeat=min(count, 3)):
            assert_close(outcome(ours(name, recompute), args, grads), outcome(pytorch(name), args, grads))


EDGES = {
    "var.dim": [(X.mean(), [0], False, False), (X.mean(), [-1], True, True), (X.mean(), None, True, False)],
    "std.dim": [(X.mean(), [0], False, False), (X.mean(), [-1], True, True)],
    "var.correction": [(X[0, 0], None, 5), (X[0, 0], None, 7), (X[0, 0], [0], 5), (X.mean(), [0], 0)],
    "std.correction": [(X[0, 0], None, 5), (X[0, 0], None, 7), (X[0, 0], [0], 7), (X.mean(), [-1], 0)],
    "pow.Tensor_Tensor": [
        (P.float(), Y),
        (P.bfloat16(), Y.float()),
        (torch.tensor([2, 0, 3]), Y[0, 0, :3]),
        (torch.tensor([0.0, 0.0, 2.0], dtype=F64), torch.tensor([2.0, 0.0, float("inf")], dtype=F64)),
    ],
    "atan2": [(X.clamp(min=0), Y.clamp(min=0)), (1e-200 * X, 1e-200 * Y)],  # the origin, and what is as near to it in float64
    "logaddexp": [(torch.tensor([float("inf"), -float("inf"), 0.0], dtype=F64), torch.tensor([float("inf"), 1.0, float("inf")], dtype=F64))],
    "sinc": [(torch.tensor([0.0, 1e-200, 1.0], dtype=F64),)],
}


@pytest.mark.parametrize("name", EDGES)
def test_equals_pytorch_at_the_edges(name):
    """Tensors without dimensions, more degrees of freedom than elements, operands of two dtypes, the origin, infinite operands and gradients."""
    for args in EDGES[name]:
        y = pytorch(name)(*args)
        for cotangent in (None, torch.full_like(y, float("inf"))):
            assert_close(outcome(ours(name), args, cotangent=cotangent), outcome(pytorch(name), args, cotangent=cotangent))


@ALL
def test_dtypes_layouts_and_sizes(name):
    for args in CASES[name]:
        for dtype in DTYPES:
            cast = lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            given = [[cast(t) for t in a] if isinstance(a, list) else cast(a) for a in args]
            try:
                expected = outcome(pytorch(name), given)
            except RuntimeError as error:
                with pytest.raises(RuntimeError) as raised:
                    outcome(ours(name), given)
                assert str(raised.value).splitlines()[0] == str(error).splitlines()[0]
                continue
            actual = outcome(ours(name), given)
            for a, e in zip(actual, expected, strict=True):
                assert (a is None) == (e is None)  # type_as gives its second operand no gradient
                if a is None:
                    continue
                assert a.dtype == e.dtype and a.shape == e.shape
                torch.testing.assert_close(a, e, equal_nan=True)
        # Other strides, gaps between elements, and no elements.
        for change in (lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0), lambda x: torch.stack((x, x), -1)[..., 0]):
            moved = [change(a) if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() else a for a in args]
            assert_close(outcome(ours(name), moved), outcome(pytorch(name), moved))
        y = pytorch(name)(*args)
        g = torch.ones((), dtype=y.dtype).expand(y.shape)
        assert_close(outcome(ours(name), args, cotangent=g), outcome(pytorch(name), args, cotangent=g))
    if all(isinstance(a, torch.Tensor) for a in CASES[name][0]):
        empty = [a[:0] for a in CASES[name][0] if a.dim()]
        if len(empty) == len(CASES[name][0]) and len({tuple(a.shape[1:]) for a in empty}) == 1:
            assert_close(outcome(ours(name), empty), outcome(pytorch(name), empty))


@ALL
def test_derivatives(name):
    for args in CASES[name]:
        if name in ("to.dtype", "_to_copy", "type_as") and args[1:] and args[1] is not F64:
            continue  # gradients of another dtype
        if name == "embedding" and len(args) > 2 or float("-inf") in [a for a in args if isinstance(a, float)]:
            continue  # no derivatives of the result: padding has no gradient by definition, and inf - inf is NaN

        def f(*leaves, of=ours):
            rest = iter(leaves)
            take = lambda x: next(rest) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            return of(name)(*[[take(t) for t in a] if isinstance(a, list) and a and isinstance(a[0], torch.Tensor) else take(a) for a in args])

        leaves = tensors(args)[1]
        assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
        try:
            assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)
        except RuntimeError as error:  # grid_sampler's in torch 2.11
            if "is not implemented" not in str(error):
                raise
            with pytest.raises(RuntimeError, match="is not implemented"):
                torch.autograd.gradgradcheck(lambda *x: f(*x, of=pytorch), leaves, fast_mode=True)


@ALL
def test_in_place(name):
    if "in_place" not in arguments_of(name) or not isinstance(CASES[name][0][0], torch.Tensor):
        return
    base, _, overload = SECOND_OPERATORS.get(name, name.replace(".", "_.", 1) if "." in name else name + "_").partition(".")
    f = getattr(getattr(torch.ops.aten, base), overload or "default")

    def overwrite(x, *rest):
        return pytorch_call(f, x.clone(memory_format=torch.preserve_format), *rest)

    def pytorch_call(f, *a):
        positional = [s.name for s in f._schema.arguments if not s.kwarg_only]
        keyword = [s.name for s in f._schema.arguments if s.kwarg_only]
        return f(*a[: len(positional)], **dict(zip(keyword, a[len(positional) :])))

    def attempt(f, args):
        try:
            return outcome(f, args)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    def same(args):
        a, b = attempt(ours(name, 1, 1), args), attempt(overwrite, args)
        if isinstance(b, str):
            assert a == b, (a, b)
        else:
            assert_close(a, b)

    for args in CASES[name]:
        same(args)
        same([args[0].float(), *args[1:]])
        same([args[0].long(), *args[1:]])
        same([args[0][:, :1] if args[0].dim() > 1 else args[0], *args[1:]])


@ALL
def test_scripted_autocast_meta(name):
    """Four calls of scripted code, eager and scripted autocast, tensors without memory."""
    args = CASES[name][0]
    if any(isinstance(a, list) and a and (a[0] is None or isinstance(a[0], torch.Tensor)) for a in args):
        return
    x = next(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
    for autocast in (False, True):
        for a in (args, [t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args], [t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                try:
                    expected = outcome(pytorch(name), a)
                except RuntimeError:
                    continue
                actual = outcome(ours(name), a)
            for u, v in zip(actual, expected, strict=True):
                assert (u is None) == (v is None)
                if u is not None:
                    assert u.dtype == v.dtype, (name, autocast)
                    torch.testing.assert_close(u, v)
    meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in args]
    y = ours(name)(*tensors(meta)[0])
    assert y.shape == pytorch(name)(*args).shape and y.device.type == "meta"
    assert x.shape is not None


@ALL
def test_recomputed_in_backward(name):
    """A product that reads the output makes it again, and the gradients are the same bits as with the output kept."""
    for args in CASES[name]:
        def through(recompute):
            def f(*a):
                a = [torch.ops.tsmem.act(t, "silu", [], recompute) if isinstance(t, torch.Tensor) and t.is_floating_point() and name not in ("sqrt", "rsqrt", "log", "log2", "log10", "pow.Tensor_Scalar", "pow.Tensor_Tensor") else t for t in a]
                y = ours(name, recompute)(*a)
                return torch.ops.tsmem.mul(y, y, recompute)
            return f

        big = [t.repeat(*[1] * (t.dim() - 1), 200) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() and t.shape[-1] == 5 and name not in ("where.self", "where.ScalarSelf", "masked_fill.Scalar", "masked_fill.Tensor", "where.ScalarOther", "pixel_shuffle") else t for t in args]
        assert_close(outcome(through(1), big), outcome(through(0), big))


@pytest.mark.parametrize("name", ["clamp", "clamp_min", "clamp_max"])
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_clamp_at_its_bounds(name, dtype):
    """What the gradient is there differs between the versions of torch: this one's."""
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, float("nan"), float("inf")], dtype=dtype, requires_grad=True)
    for bounds in {"clamp": [(-1, 1), (-1.0, None), (None, 1), (1, -1)], "clamp_min": [(-1,), (0.0,)], "clamp_max": [(1,), (0.0,)]}[name]:
        got, want = (torch.autograd.grad(f(x, *bounds).sum(), x)[0] for f in (ours(name), pytorch(name)))
        assert torch.equal(got, want), bounds


KEEPS_NOTHING = ["abs", "neg", "square", "exp", "sin", "erf", "sigmoid", "tanh", "add.Scalar", "mul.Scalar", "div.Scalar", "rsub.Scalar", "clamp_min", "sqrt", "to.dtype", "flip", "clone"]


@pytest.mark.parametrize("name", KEEPS_NOTHING)
def test_chains_keep_nothing(name):
    """Between an activation's input, which is kept, and a product: no more is kept than those two have."""
    x = positive(64, 1024).float().requires_grad_()
    w = torch.rand(1024, dtype=torch.float32, requires_grad=True)
    rest = (torch.float64,) if name == "to.dtype" else ([0, 1],) if name == "flip" else tuple(a for a in CASES[name][0][1:])

    def f():
        y = torch.ops.tsmem.act(x * 1, "silu", [], 1)
        y = ours(name)(y, *rest)
        y = ours(name)(y, *rest)
        return torch.ops.tsmem.mul(y.float(), w, 1).sum()

    assert live_bytes(f) <= x.numel() * 4 + (x.numel() * 4 if name == "to.dtype" else 0) + 3 * w.numel() * 8


def test_a_small_source_is_held():
    """x - mean: nobody keeps the mean, which is as small as a row of x."""
    x = data(512, 64, 8).float().requires_grad_()

    def f():
        y = torch.ops.tsmem.act(x * 1, "silu", [], 1)
        y = torch.ops.tsmem.sub(y, y.mean((1, 2), True), 1, 1)
        return torch.ops.tsmem.mul(y, torch.ones(8, requires_grad=True), 1).sum()

    assert live_bytes(f) <= 1.05 * x.numel() * 4
    expected = (torch.nn.functional.silu(x) - torch.nn.functional.silu(x).mean((1, 2), True)).sum()
    torch.testing.assert_close(torch.autograd.grad(f(), x)[0], torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("name", ["exp", "sub.Tensor", "div.Tensor", "pow.Tensor_Scalar", "rsqrt", "clamp", "index_select"])
def test_vmap(name):
    args = CASES[name][0]
    given = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    def call(f):
        def g(*leaves):
            rest = iter(leaves)
            return f(*[next(rest) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args])
        return g
    stacked = [torch.stack((t, t + 1)) for t in given]
    assert_equal([torch.func.vmap(call(ours(name)))(*stacked)], [torch.func.vmap(call(pytorch(name)))(*stacked)], layout=False)
    for f, g in zip(*(torch.func.vmap(torch.func.grad(lambda *a, h=h: call(h)(*a).sin().sum(), tuple(range(len(given)))))(*stacked) for h in (ours(name), pytorch(name)))):
        torch.testing.assert_close(f, g)


def test_saved_without_a_gradient():
    x = data(64, 128)
    w = x.clone().requires_grad_()
    assert saved(lambda: ours("exp")(x))[0] == []
    assert len(saved(lambda: ours("div.Tensor")(w, x))[0]) == 1
    with torch.no_grad():
        assert not ours("exp")(w).requires_grad


LISTS = ["stack", "hstack", "vstack", "dstack", "column_stack"]


@pytest.mark.parametrize("name", LISTS)
def test_an_empty_list_raises_as_pytorch_does(name):
    with pytest.raises(RuntimeError) as theirs:
        pytorch(name)([])
    with pytest.raises(RuntimeError) as error:
        op("tsmem", name)([])
    assert str(error.value).splitlines()[0] == str(theirs.value).splitlines()[0]


@pytest.mark.parametrize("dtypes", itertools.product((torch.bfloat16, torch.float32, torch.float16, F64), repeat=2), ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_lists_under_autocast(name, dtypes):
    """Autocast casts to the widest dtype, and takes no float16 beside bfloat16; where it casts nothing the result is made again."""
    def step(f):
        pieces = [X.clone().to(d).requires_grad_() for d in dtypes]
        with torch.autocast("cpu", torch.bfloat16):
            made = f([torch.ops.tsmem.act(p, "relu", [], 1) for p in pieces])
        grads = torch.autograd.grad(made.sin().sum(), pieces)
        return [made, *grads]

    try:
        theirs = step(pytorch(name))
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
            step(ours(name))
        return
    assert_equal(step(ours(name)), theirs)


@pytest.mark.parametrize("name", LISTS)
def test_lists_run_again_under_autocast(name):
    def kept():
        x = X.bfloat16().repeat(1, 1, 20).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.ops.tsmem.act(x, "relu", [], 1)
            return torch.ops.tsmem.act(ours(name)([y, y]), "silu", [], 1)

    together = 2 * 20 * X.numel() * 2
    assert live_bytes(kept) < together


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_small_gradient_of_a_large_norm_is_no_zero(dtype):
    """The gradient was divided by the norm before it met the element: in float16 nothing was left."""
    torch.manual_seed(0)
    values = torch.cat([torch.full((1,), 300.0), torch.rand(1023) + 0.5]).to(dtype)

    def gradient(f, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x * 1.0) * 1e-4, x)[0]

    exact = gradient(torch.linalg.vector_norm, values.double())

    def error(found):
        return ((found.double() - exact).abs().max() / exact.abs().max()).item(), ((found.double() - exact)[1:].abs().max() / exact[1:].abs().max()).item()

    theirs = error(gradient(torch.linalg.vector_norm, values))
    for again in (0, 1):
        ours = error(gradient(lambda x: torch.ops.tsmem.linalg_vector_norm(x, recompute=again), values))
        assert ours[0] <= 2 * theirs[0] + 1e-3 and ours[1] <= 2 * theirs[1] + 1e-2
