"""Recurrent networks: PyTorch's numbers, draws and errors; kept are the input, the output and an LSTM's cell at chunk borders."""

import itertools
import math
import re

import pytest
import torch
from op_checks import assert_equal, saved
from torch import nn

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


class Net:
    """The operands of a network, and the operator's other arguments. `lengths`: packed sequences."""

    def __init__(self, kind, layers=1, bidirectional=False, biases=True, proj=0, batch_first=False, dropout=0.0, train=True, steps=7, batch=3, inputs=5, hidden=6,
                 lengths=None, dtype=torch.float64, device="cpu", wants=lambda name: True, seed=3):
        self.kind, self.rest = kind, (biases, layers, dropout, train, bidirectional)
        g = torch.Generator().manual_seed(seed)
        directions, columns = 1 + bidirectional, proj or hidden

        def operand(name, *sizes, scale=1.0):
            t = (torch.randn(*sizes, generator=g, dtype=torch.float64) * scale).to(dtype).to(device)
            return t.requires_grad_(wants(name))

        if lengths is None:
            self.x = operand("x", *((batch, steps) if batch_first else (steps, batch)), inputs)
            self.first, self.rest = (), (*self.rest, batch_first)
        else:
            sizes = torch.tensor([sum(n > t for n in lengths) for t in range(max(lengths))])
            self.x, self.first, batch = operand("x", sum(lengths), inputs), (sizes,), len(lengths)
        self.states = [operand("h", layers * directions, batch, columns)]
        if kind == "lstm":
            self.states.append(operand("c", layers * directions, batch, hidden))
        self.params, rows = [], GATES[kind] * hidden
        for layer, _ in itertools.product(range(layers), range(directions)):
            self.params += [operand("w_ih", rows, directions * columns if layer else inputs, scale=0.4), operand("w_hh", rows, columns, scale=0.4)]
            if biases:
                self.params += [operand("b_ih", rows), operand("b_hh", rows)]
            if proj:
                self.params.append(operand("w_hr", proj, hidden, scale=0.4))

    def operands(self):
        return [self.x, *self.states, *self.params]

    def arguments(self, operands=None):
        x, *others = operands or self.operands()
        states, params = others[: len(self.states)], others[len(self.states) :]
        return (x, *self.first, states if self.kind == "lstm" else states[0], params, *self.rest)

    def call(self, ops, operands=None):
        return getattr(ops, self.kind)(*self.arguments(operands))


def step(net, ops, outputs=None, seed=0):
    """Outputs, gradients of what requires one, and the generator's state afterwards."""
    operands = [t.detach().requires_grad_(t.requires_grad) for t in net.operands()]
    torch.manual_seed(seed)
    results = net.call(ops, operands)
    drawn = torch.get_rng_state()
    used = [r for i, r in enumerate(results) if (outputs is None or i in outputs) and r.requires_grad]
    g = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(r.shape, generator=g, dtype=torch.float64).to(r) for r in used]
    wanted = [t for t in operands if t.requires_grad]
    grads = torch.autograd.grad(used, wanted, cotangents, allow_unused=True) if used and wanted else []
    return list(results), list(grads), drawn


def assert_alike(net, ops, outputs=None, rtol=1e-9, unused=True):
    ours, theirs = step(net, ops, outputs), step(net, torch, outputs)
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype and a.requires_grad == b.requires_grad
    for a, b in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        if (a is None) == (b is None):
            assert a is None or (a.shape == b.shape and (a - b).norm() <= rtol * b.norm().clamp(min=1e-3))
        else:  # gradients of zeros
            assert unused and not (a if b is None else b).any()
    assert torch.equal(ours[2], theirs[2])


def is_ours(results):
    """Whether the op's own node made the results (a view, or a concatenation of layers' states)."""
    seen, nodes = set(), [r.grad_fn for r in results]
    while nodes:
        n = nodes.pop()
        if n is not None and n not in seen:
            seen.add(n)
            nodes += [f for f, _ in n.next_functions]
    return any("tsmem" in n.name() and "RnnLayer" in n.name() for n in seen)  # oneDNN's is MkldnnRnnLayerBackward


SHAPES = {
    "one layer": {},
    "two layers": {"layers": 2},
    "no biases": {"layers": 2, "biases": False},
    "bidirectional": {"layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True, "layers": 2},
    "one step": {"steps": 1},
    "one row": {"batch": 1, "steps": 4},
    "chunks": {"steps": 23, "batch": 130},
    "chunks in both directions": {"steps": 23, "batch": 130, "bidirectional": True, "layers": 2, "batch_first": True},
    "wider than a block": {"hidden": 259, "inputs": 2, "steps": 3},
    "more rows, terms and columns than a block": {"hidden": 133, "inputs": 2, "steps": 5, "batch": 13},
    "packed": {"lengths": (7, 5, 5, 2, 1)},
    "packed, of one length": {"lengths": (4, 4, 4), "layers": 2},
    "packed in both directions": {"lengths": (7, 5, 5, 2, 1), "layers": 2, "bidirectional": True},
    "packed in chunks": {"lengths": tuple(range(40, 0, -1)) * 1 + (1,) * 200, "bidirectional": True},
    "packed, long": {"lengths": tuple(sorted((31 * i % 24 + 1 for i in range(150)), reverse=True)), "layers": 2},
    "evaluation": {"train": False, "dropout": 0.4, "layers": 2},
    "dropout": {"dropout": 0.4, "layers": 3},
    "dropout in both directions": {"dropout": 0.4, "layers": 2, "bidirectional": True, "batch_first": True},
    "dropout, packed": {"dropout": 0.4, "layers": 2, "lengths": (7, 5, 5, 2, 1)},
    "dropout of all": {"dropout": 1.0, "layers": 2},
}
PROJECTED = ("one layer", "two layers", "no biases", "bidirectional", "chunks in both directions", "packed in both directions", "packed in chunks", "dropout")
CASES = [(k, s, 0) for k in KINDS for s in SHAPES] + [("lstm", s, 4) for s in PROJECTED]


@pytest.mark.parametrize("kind,shape,proj", CASES)
def test_like_pytorchs(ops, kind, shape, proj):
    net = Net(kind, proj=proj, **SHAPES[shape])
    assert is_ours(net.call(ops))
    assert_alike(net, ops)


@pytest.mark.parametrize("kind,shape,proj", CASES)
def test_float32_is_no_further_from_float64(ops, kind, shape, proj):
    """On average over results and draws of the operands: what single ones are off by is chance."""
    logs = []
    for seed in (3, 4, 5):
        exact = step(Net(kind, proj=proj, seed=seed, **SHAPES[shape]), torch)
        net = Net(kind, proj=proj, seed=seed, dtype=torch.float32, **SHAPES[shape])
        ours, theirs = step(net, ops), step(net, torch)
        for a, b, e in zip(*(s[0] + s[1] for s in (ours, theirs, exact)), strict=True):
            off, own = ((t.double() - e).norm() + 1e-8 * e.norm() + 1e-30 for t in (a, b))
            assert off <= 8 * own + 1e-6 * e.norm()
            logs.append((off / own).log())
        assert torch.equal(ours[2], theirs[2])
    assert torch.stack(logs).mean().exp() <= 2


@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("shape", ["one layer", "two layers", "packed in both directions", "chunks"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_some_of_the_results_are_used(ops, kind, shape, outputs):
    if kind == "gru" and outputs == (2,):
        outputs = (1,)
    assert_alike(Net(kind, **SHAPES[shape]), ops, outputs)


@pytest.mark.parametrize("kind,proj", [(k, 0) for k in KINDS] + [("lstm", 4)])
def test_every_combination_of_gradients(ops, kind, proj):
    names = ["x", "h", *(["c"] if kind == "lstm" else []), "w_ih", "w_hh", "b_ih", "b_hh", *(["w_hr"] if proj else [])]
    for wanted in itertools.product((False, True), repeat=len(names)):
        net = Net(kind, proj=proj, steps=3, batch=2, wants=lambda name, wanted=dict(zip(names, wanted)): wanted[name])
        assert is_ours(net.call(ops)) == any(wanted)
        assert_alike(net, ops)


@pytest.mark.parametrize("kind", KINDS)
def test_one_trainable_layer(ops, kind):
    for layer in range(3):
        net = Net(kind, layers=3, wants=lambda name: False)
        for w in net.params[4 * layer : 4 * layer + 4]:
            w.requires_grad_()
        assert_alike(net, ops)


@pytest.mark.parametrize("kind,shape,proj", [(k, s, 0) for k in KINDS for s in ("one layer", "bidirectional")] + [("lstm", "bidirectional", 2)])
def test_gradcheck(ops, kind, shape, proj):
    sizes = {"steps": 3, "batch": 2, "inputs": 2, "hidden": 3}
    net = Net(kind, proj=proj, **sizes, **SHAPES[shape])
    assert torch.autograd.gradcheck(lambda *t: tuple(net.call(ops, t)), net.operands())


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(ops, kind):
    small = [(s, p) for s in ("one layer", "no biases", "bidirectional", "batch first", "packed, of one length") for p in ((0, 1) if kind == "lstm" else (0,))]
    for shape, proj in small:
        net = Net(kind, proj=proj, **{"steps": 2, "batch": 2, "inputs": 2, "hidden": 2, **SHAPES[shape], **({"layers": 1} if "layers" in SHAPES[shape] else {})})
        assert torch.autograd.gradgradcheck(lambda *t, n=net: tuple(n.call(ops, t)), net.operands()), shape
    # float32 too, which PyTorch gives to an operator of oneDNN's without second derivatives; some results used alone.
    for outputs in itertools.chain.from_iterable(itertools.combinations(range(3 if kind == "lstm" else 2), n) for n in (1, 2)):
        found = []
        for dtype in (torch.float64, torch.float32):
            net = Net(kind, dtype=dtype, dropout=0.0, layers=2, bidirectional=True)
            results = net.call(ops)
            first = torch.autograd.grad([results[i].square().sum() for i in outputs], net.operands(), create_graph=True, allow_unused=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first if g is not None), net.operands(), allow_unused=True))
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b.double(), a, rtol=1e-3, atol=1e-3 * float(a.abs().max()))


@pytest.mark.parametrize("shape", ["one layer", "bidirectional", "chunks", "chunks in both directions", "packed in chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(ops, kind, shape):
    """Beside operands and results: the outputs of inner layers, and an LSTM's cells where chunks of steps begin."""
    net = Net(kind, **SHAPES[shape])
    kept, results = saved(lambda: net.call(ops))
    there = {t.untyped_storage().data_ptr() for t in (*net.operands(), *results)}
    extra = [t.untyped_storage().nbytes() for t in kept if t.untyped_storage().data_ptr() not in there]
    biases, layers, _, _, bidirectional = net.rest[:5]
    steps = len(net.first[0]) if net.first else results[0].shape[1 if net.rest[-1] else 0]
    batch, directions = net.states[0].shape[1], 1 + bidirectional
    inner = [results[0].nbytes] * (layers - 1)
    by = min(steps, max(math.ceil(steps**0.5), math.ceil(512 / batch)))
    borders = [math.ceil(steps / by) * directions * batch * 6 * 8] * layers if kind == "lstm" else []
    assert sorted(n for n in extra if n) == sorted(n for n in inner + borders if n)


def test_gates_stay_where_onednn_would_run(ops):
    """float32, neither packed nor projected: the gates, once, beside the state at chunk borders; else none."""
    for shape, proj, dtype, gates in (("chunks", 0, torch.float32, True), ("chunks", 4, torch.float32, False), ("packed, long", 0, torch.float32, False), ("chunks", 0, torch.float64, False)):
        net = Net("lstm", proj=proj, dtype=dtype, **SHAPES[shape])
        kept = [t.nbytes for t in saved(lambda net=net: net.call(ops))[0]]
        rows = net.x.numel() // net.x.shape[-1]
        assert (rows * 4 * 6 * dtype.itemsize in kept) == gates


def test_bytes_beside_pytorchs(ops):
    """Of a network as they are used: a fifth of what float64 PyTorch keeps, and half of what its own kernel of float32 does."""
    for dtype, most in ((torch.float64, 0.2), (torch.float32, 0.5)):
        net = Net("lstm", layers=2, steps=64, batch=8, inputs=64, hidden=64, dtype=dtype)
        weights = {t.untyped_storage().data_ptr() for t in net.params}
        ours, theirs = (sum(t.untyped_storage().nbytes() for t in saved(lambda: net.call(o))[0] if t.untyped_storage().data_ptr() not in weights) for o in (ops, torch))
        assert ours <= most * theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_pytorchs(ops, kind, dtype):
    net = Net(kind, layers=2, dtype=dtype)
    assert not is_ours(net.call(ops))
    for a, b in zip(step(net, ops)[:2], step(net, torch)[:2], strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_pytorchs(ops, kind):
    net = Net(kind, layers=2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            theirs = step(net, torch)
        except RuntimeError as error:  # oneDNN's has no kernel for this processor: without AVX-512
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                step(net, ops)
            return
        ours = step(net, ops)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_it_is_pytorchs(ops, kind):
    net = Net(kind, layers=2, bidirectional=True)
    with torch.no_grad():
        assert_equal(list(net.call(ops)), list(net.call(torch)))
    frozen = Net(kind, layers=2, wants=lambda name: False)
    assert_equal(list(frozen.call(ops)), list(frozen.call(torch)))
    with torch.inference_mode():
        assert_equal(list(net.call(ops)), list(net.call(torch)))


@pytest.mark.parametrize("kind", KINDS)
def test_operands_in_any_layout(ops, kind):
    net = Net(kind, layers=2, bidirectional=True, steps=6, batch=6)

    class Strided:
        def __init__(self, of):
            self.of = of

        def __getattr__(self, name):
            def call(x, *arguments):
                hidden, params, *rest = arguments
                states = hidden if isinstance(hidden, list) else [hidden]
                states = [t.mT.contiguous().mT for t in states]
                params = [torch.stack([p, p], -1)[..., 0] for p in params]
                return getattr(self.of, name)(x.transpose(0, 1), states if isinstance(hidden, list) else states[0], params, *rest)

            return call

    ours, theirs = step(net, Strided(ops)), step(net, Strided(torch))
    for a, b in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    one = torch.randn(6, 1, 5, dtype=torch.float64, requires_grad=True)
    g = [torch.autograd.grad(net.call(o, [one.expand(6, 6, 5), *net.operands()[1:]])[0].square().sum(), one)[0] for o in (ops, torch)]
    torch.testing.assert_close(*g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_any_layout(ops, kind):
    """Of expanded and transposed results."""
    net = Net(kind, steps=6, batch=6, batch_first=True, layers=2)
    for f in (lambda r: r[0].sum() + r[1].sum(), lambda r: (r[0].transpose(1, 2).exp()).sum(), lambda r: r[0][:, -1].square().sum(), lambda r: r[1][-1].mT.exp().sum()):
        ours, theirs = (torch.autograd.grad(f(net.call(o)), net.operands(), allow_unused=True) for o in (ops, torch))
        for a, b in zip(ours, theirs, strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
            else:
                assert not any(t.any() for t in (a, b) if t is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_twice_and_in_part(ops, kind):
    net = Net(kind, layers=2)
    results = net.call(ops)
    loss = sum(r.square().sum() for r in results)
    first, second = (torch.autograd.grad(loss, net.operands(), retain_graph=True) for _ in range(2))
    assert_equal(first, second)
    assert_equal(torch.autograd.grad(loss, [net.params[1]]), first[len(net.states) + 2 : len(net.states) + 3])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_must_stay_as_it_is(ops, kind):
    """A write to the output raises, never a wrong number: PyTorch's may allow it, and the rewriter leaves such a network as it is."""
    for write in (lambda n, r: r[0].mul_(2), lambda n, r: r[0][:, 0].zero_(), lambda n, r: n.params[1].detach().mul_(2), lambda n, r: n.x.detach().mul_(2)):
        net = Net(kind, layers=2, batch_first=True)
        results = net.call(ops)
        write(net, results)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[0].sum().backward()
    net = Net(kind, layers=2)
    results = net.call(ops)
    want = torch.autograd.grad(results[0].sum(), net.params, retain_graph=True)
    results[1].mul_(2)  # a last state is nobody's
    assert_equal(torch.autograd.grad(results[0].sum(), net.params), want)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_and_errors_are_pytorchs(ops, kind):
    empty = Net(kind, batch=0, layers=2)
    assert_alike(empty, ops)
    wrong = {
        "no steps": lambda n: setattr(n, "x", n.x[:0]),
        "input's width": lambda n: setattr(n, "x", n.x[..., :2]),
        "batch": lambda n: setattr(n, "x", n.x[:, :2]),
        "state's sizes": lambda n: n.states.__setitem__(0, n.states[0][..., :2]),
        "weights": lambda n: n.params.pop(),
        "a weight's sizes": lambda n: n.params.__setitem__(1, n.params[1][:, :2]),
        "dtypes": lambda n: n.params.__setitem__(0, n.params[0].float()),
    }
    for name, spoil in wrong.items():
        net = Net(kind, layers=2)
        spoil(net)
        messages = []
        for o in (torch, ops):
            try:
                net.call(o)
                messages.append(None)
            except RuntimeError as e:
                messages.append(str(e).splitlines()[0])
        assert messages[0] == messages[1], name


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_that_do_not_add_up_are_pytorchs(ops, kind):
    for sizes in ([3, 2], [2, 3, 1], [3, 2, 2]):
        messages = []
        for o in (torch, ops):
            net = Net(kind, lengths=(3, 2, 1))
            net.first = (torch.tensor(sizes),)
            try:
                net.call(o)
                messages.append(None)
            except RuntimeError as e:
                messages.append(str(e).splitlines()[0])
        assert messages[0] == messages[1], sizes


@pytest.mark.parametrize("shape", ["bidirectional", "batch first", "packed in both directions", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_meta(ops, kind, shape):
    """Results and gradients without data, as --estimate and FakeTensor need them."""
    real, meta = Net(kind, **SHAPES[shape]), Net(kind, device="meta", **SHAPES[shape])
    for a, b in zip(real.call(ops), meta.call(ops), strict=True):
        assert b.is_meta and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    results = meta.call(ops)
    for t, g in zip(meta.operands(), torch.autograd.grad([r.sum() for r in results], meta.operands()), strict=True):
        assert g.is_meta and g.shape == t.shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_meta_of_the_raw_op(ops, kind, dtype):
    """All that it makes, chunk borders included."""
    made = []
    for device in ("cpu", "meta"):
        n = Net(kind, steps=23, batch=130, bidirectional=True, dtype=dtype, device=device)
        made.append(ops._rnn_layer(n.x, [], n.states[0], n.states[1] if kind == "lstm" else None, n.params, KINDS.index(kind), True, True))
    for a, b in zip(*made, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_function_transforms_are_pytorchs(ops, kind):
    """vmap has no rule for recurrent networks in PyTorch either."""
    net = Net(kind)
    xs = torch.randn(2, 7, 3, 5, dtype=torch.float64)
    f = [lambda x, o=o: net.call(o, [x, *(t.detach() for t in net.operands()[1:])])[0] for o in (ops, torch)]
    for transformed in (torch.func.vmap, lambda g: torch.func.vmap(torch.func.grad(lambda x: g(x).sin().sum()))):
        for g in f:
            with pytest.raises(RuntimeError):
                transformed(g)(xs)
    torch.testing.assert_close(*(torch.func.grad(lambda x, g=g: g(x).sin().sum())(xs[0]) for g in f), rtol=1e-12, atol=1e-12)
    tangent = torch.randn_like(xs[0])
    torch.testing.assert_close(*(torch.func.jvp(g, (xs[0],), (tangent,)) for g in f), rtol=1e-9, atol=1e-12)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(5, 6, 2, dropout=0.3, bidirectional=True)

    def forward(self, x, h, c):
        draw: list[int] = []
        return torch.ops.tsmem.lstm(x, [h, c], self.net._flat_weights, True, 2, 0.3, self.training, True, False, draw)


def test_scripted_calls(ops):
    """Calls 1 to 4 of a scripted caller, in training and evaluation; two equal calls draw twice."""
    module = Scripted().double()
    scripted = torch.jit.script(module)
    x, h, c = torch.randn(7, 3, 5, dtype=torch.float64), torch.randn(4, 3, 6, dtype=torch.float64), torch.randn(4, 3, 6, dtype=torch.float64)
    for train in (True, False):
        for call in range(4):
            both = []
            for m in (scripted, module):
                m.train(train)
                torch.manual_seed(call)
                if m is scripted:
                    y, hn, cn = m(x, h, c)
                else:
                    y, (hn, cn) = m.net(x, (h, c))
                m.zero_grad()
                (y.square().sum() + hn.sum() + cn.sum()).backward()
                both.append([y.detach(), hn.detach(), cn.detach(), torch.get_rng_state(), *(p.grad for p in m.parameters())])
            for a, b in zip(*both, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)

    @torch.jit.script
    def twice(x, h, c, w: list[torch.Tensor]):
        first: list[int] = []
        second: list[int] = []
        a = torch.ops.tsmem.lstm(x, [h, c], w, True, 2, 0.3, True, True, False, first)
        b = torch.ops.tsmem.lstm(x, [h, c], w, True, 2, 0.3, True, True, False, second)
        return a[0], b[0]

    for _ in range(4):
        a, b = twice(x, h, c, list(module.parameters()))
        assert not torch.equal(a, b)


def test_hooks(ops):
    """Under saved-tensor hooks, which may replace what is saved."""
    net = Net("lstm", layers=2)
    plain = step(net, ops)
    with torch.autograd.graph.save_on_cpu():
        kept = step(net, ops)
    assert_equal(kept[0] + kept[1], plain[0] + plain[1])


def test_kernels_of_half_precision(ops):
    """The raw op takes bfloat16 as well, which the network leaves to PyTorch's faster one: within its rounding of float32."""
    for kind, cell in zip(KINDS, range(4)):
        exact, half = (Net(kind, dtype=d) for d in (torch.float32, torch.bfloat16))
        results = [ops._rnn_layer(n.x, [], n.states[0], n.states[1] if kind == "lstm" else None, n.params, cell, True, False) for n in (exact, half)]
        assert (results[1][0].float() - results[0][0]).norm() <= 0.05 * results[0][0].norm()


def test_gates_of_an_lstm_outlive_all_backward_passes_but_the_last(ops):
    """In float32 they are kept; the last pass writes their gradients in their place."""
    net = Net("lstm", layers=2, bidirectional=True, dtype=torch.float32)
    wanted = [t for t in net.operands() if t.requires_grad]
    out = net.call(ops)[0]
    first, second, last = (torch.autograd.grad(out.square().sum(), wanted, retain_graph=retain) for retain in (True, True, False))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, last))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.square().sum(), wanted)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append((t, t.clone())) or t, lambda t: t):
        out = net.call(ops)[0]
    torch.autograd.grad(out.square().sum(), wanted)
    assert all(torch.equal(t, was) for t, was in held)
