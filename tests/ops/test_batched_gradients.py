"""Many gradients at once (is_grads_batched, torch.func.vmap over autograd.grad): each is what it is alone, and what PyTorch's operators give."""

import pytest
import torch
import torch.nn.functional as F
import tsmem
from differentiable_cases import CASES, WAYS, fresh, ops
from op_checks import assert_equal
from torch import nn

SIZE = 3


def cotangents(like, dim=0):
    t = torch.randn(SIZE, *like.shape, generator=torch.Generator().manual_seed(2), dtype=like.dtype)
    return t.movedim(0, dim)


def one_by_one(out, wanted, grads):
    each = [torch.autograd.grad(out, wanted, g, retain_graph=True, allow_unused=True) for g in grads.unbind()]
    return [torch.stack(gs) if gs[0] is not None else None for gs in zip(*each, strict=True)]


def by_autograd(out, wanted, grads):
    return torch.autograd.grad(out, wanted, grads, is_grads_batched=True, retain_graph=True)


def by_vmap(out, wanted, grads):
    return torch.func.vmap(lambda g: torch.autograd.grad(out, wanted, g, retain_graph=True))(grads)


def by_vmap_along_the_last(out, wanted, grads):
    return torch.func.vmap(lambda g: torch.autograd.grad(out, wanted, g, retain_graph=True), in_dims=out.dim())(grads.movedim(0, -1))


@pytest.mark.parametrize("batched", [by_autograd, by_vmap, by_vmap_along_the_last])
@pytest.mark.parametrize("name", CASES)
def test_as_one_by_one(name, batched):
    leaves, ours, pytorch = CASES[name]
    some = [(True,) * len(leaves), *(tuple(i != k for i in range(len(leaves))) for k in range(len(leaves)))]
    for needs in some:
        own = fresh(leaves, needs)
        want = None
        for again in (None, *WAYS):
            x, *rest = own
            out = pytorch(F.silu(x), *rest) if again is None else ours(again, ops.act(x, "silu", [], again), *rest)
            wanted = [t for t in own if t.requires_grad]
            if again is None:
                want = one_by_one(out, wanted, cotangents(out))
                continue
            found = batched(out, wanted, cotangents(out))
            for f, w in zip(found, want, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-9, atol=1e-9)
            # The graph is whole after it.
            for f, w in zip(one_by_one(out, wanted, cotangents(out)), want, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-9, atol=1e-9)


def drawn(x):
    x = ops.rrelu(ops.dropout.effect(x, 0.5, True, False, 1), 0.1, 0.3, True, 1, [0])
    return ops.feature_alpha_dropout.effect(ops.alpha_dropout.effect(x, 0.3, True, 1), 0.3, True, 1)


RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}


def recurrent(kind, source, dtype):
    torch.manual_seed(0)
    layer = RECURRENT[kind](5, 6, 2, batch_first=True).to(dtype)
    state = torch.zeros(2, 3, 6, dtype=dtype)
    op = getattr(source, kind)
    op = op.input if source is torch.ops.aten else op.input_effect
    return lambda x: op(x, [state] * 2 if kind == "lstm" else state, layer._flat_weights, True, 2, 0.0, True, False, True)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batched", [by_autograd, by_vmap])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent(kind, batched, dtype):
    x = torch.randn(3, 7, 5, dtype=dtype, requires_grad=True)
    out = recurrent(kind, torch.ops.aten, dtype)(x)
    want = one_by_one(out, [x], cotangents(out))
    out = recurrent(kind, ops, dtype)(x)
    torch.testing.assert_close(list(batched(out, [x], cotangents(out))), want)
    # The last pass over a graph may overwrite what it keeps, but not before the batch's last gradient.
    torch.testing.assert_close(list(torch.autograd.grad(out, [x], cotangents(out), is_grads_batched=True)), want)
    out = recurrent(kind, ops, dtype)(x)
    nested = torch.func.vmap(lambda gs: torch.func.vmap(lambda g: torch.autograd.grad(out, x, g)[0])(gs))(cotangents(out)[None])
    torch.testing.assert_close(nested[0], want[0])


@pytest.mark.parametrize("keep", [True, False])
def test_linear_cross_entropy(keep):
    torch.manual_seed(0)
    x, w = torch.randn(40, 16, requires_grad=True), torch.randn(11, 16, requires_grad=True)
    target, grads = torch.arange(40) % 11, torch.tensor([1.0, -2.0, 0.5])
    want = one_by_one(F.cross_entropy(F.linear(x, w), target), [x, w], grads)
    loss = ops.linear_cross_entropy(x, w, None, target)
    found = torch.autograd.grad(loss, [x, w], grads, is_grads_batched=True, retain_graph=keep)
    torch.testing.assert_close(list(found), want)


@pytest.mark.parametrize("batched", [by_autograd, by_vmap])
def test_what_was_drawn(batched):
    """One draw for all of the batch: forward's. Nothing is drawn in backward."""
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    out = drawn(x)
    want = one_by_one(out, [x], cotangents(out))
    state = torch.get_rng_state()
    assert_equal(list(batched(out, [x], cotangents(out))), want)
    assert torch.equal(state, torch.get_rng_state())


def test_one_gradient_inside_vmap():
    """What is mapped over has nothing to do with the gradient: backward runs as outside, where it may draw again."""
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    out = ops.act(drawn(x), "silu", [], 1)
    cotangent = torch.randn_like(out)
    (want,) = torch.autograd.grad(out, x, cotangent, retain_graph=True)
    scales = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = torch.func.vmap(lambda s: torch.autograd.grad(out, x, cotangent, retain_graph=True)[0] * s)(scales)
    assert_equal(list(found), [want, want * 2])
    derivative = torch.func.grad(lambda s: (torch.autograd.grad(out, x, cotangent, retain_graph=True)[0] * s).sum())(scales[0])
    torch.testing.assert_close(derivative, want.sum())


def test_inside_of_another_transform():
    """A gradient of a batch that torch.func.grad has wrapped, and one that it has not seen."""
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    out = ops.group_norm_act(x, 2, None, None, 1e-5, True, "silu", [], 1)
    one = torch.ones((), dtype=torch.float64)

    def through(t):
        return torch.func.vmap(lambda c: torch.func.grad(lambda s: (torch.autograd.grad(t, x, c, retain_graph=True)[0] * s).sum())(one))

    for t in (out, out.sin()):
        grads = cotangents(t)
        torch.testing.assert_close(through(t)(grads), torch.stack([g.sum() for g in one_by_one(t, [x], grads)[0]]))
    aux = torch.func.vmap(lambda g: torch.func.grad(lambda s: (s * s, torch.autograd.grad(out, x, g, retain_graph=True)[0]), has_aux=True)(one)[1])
    torch.testing.assert_close(aux(cotangents(out)), one_by_one(out, [x], cotangents(out))[0])
    y, w = torch.randn(40, 16, requires_grad=True), torch.randn(11, 16, requires_grad=True)
    target = torch.arange(40) % 11
    (want,) = torch.autograd.grad(F.cross_entropy(F.linear(y, w), target), y)
    loss = ops.linear_cross_entropy(y, w, None, target)
    found = torch.func.grad(lambda s: (torch.autograd.grad(loss, y)[0] * s).sum())(torch.ones(()))
    torch.testing.assert_close(found, want.sum())


def test_an_empty_batch():
    x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.rand(4, requires_grad=True)
    out = ops.group_norm_act(x, 2, w, None, 1e-5, True, "silu", [], 1)
    found = by_vmap(out, [x, w], torch.empty(0, *out.shape))  # where PyTorch's own group norm raises
    assert [f.shape for f in found] == [(0, *x.shape), (0, *w.shape)]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 5))

    def forward(self, x):
        return self.body(self.stem(x))


def network():
    torch.manual_seed(0)
    return Network().double()


DOORS = {
    "file": lambda: tsmem.rewrite(torch.jit.script(network())),
    "checkpoint": lambda: tsmem.rewrite(torch.jit.script(network()), checkpoint=["body"]),
    "compile": lambda: torch.compile(network(), backend="tsmem", options={"strict": True}),
}


@pytest.mark.parametrize("door", DOORS)
def test_jacobians_and_hessians(door):
    x = torch.randn(2, 3, 18, 18, dtype=torch.float64)
    of = torch.autograd.functional
    model = DOORS[door]()

    def drawn_once(f):
        def call(t):
            torch.manual_seed(1)
            return f(t)

        return call

    torch.testing.assert_close(of.jacobian(drawn_once(model), x, vectorize=True), of.jacobian(drawn_once(network()), x), rtol=1e-9, atol=1e-12)
    some = x[:, :1, :6, :6].clone()

    def squares(f):
        return lambda t: drawn_once(f)(F.pad(t, (6, 6, 6, 6)).expand(2, 3, 18, 18)).square().sum()

    torch.testing.assert_close(of.hessian(squares(model), some, vectorize=True), of.hessian(squares(network()), some), rtol=1e-9, atol=1e-9)


def test_second_derivatives_of_a_batch():
    """A Hessian's rows at once: the first gradients are differentiated, and the second ones batched."""
    x0, w = torch.randn(2, 4, 6, 6, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5

    def rows(f):
        x = x0.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g, x, cotangents(g), is_grads_batched=True)[0]

    want = rows(lambda x: F.silu(F.group_norm(x, 2, w)))
    for again in WAYS:
        torch.testing.assert_close(rows(lambda x, r=again: ops.group_norm_act(x, 2, w, None, 1e-5, True, "silu", [], r)), want)


def test_batches_in_batches():
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    out = ops.act(ops.group_norm_act(x, 2, None, None, 1e-5, True, "silu", [], 1), "relu", [], 1)
    grads = torch.randn(2, SIZE, *out.shape, dtype=torch.float64)
    for row in (by_vmap, by_autograd):
        found = torch.func.vmap(lambda gs: by_vmap(out, [x], gs))(grads) if row is by_vmap else [torch.stack([by_autograd(out, [x], gs)[0] for gs in grads])]
        want = torch.stack([one_by_one(out, [x], gs)[0] for gs in grads])
        torch.testing.assert_close(found[0], want)
