"""Outputs that backward makes again: numbers, what is kept, and that everybody who may interfere is heard."""
import gc
import threading
import weakref

import allocator
import pytest
import torch
import tsmem  # noqa: F401  loads the operators
from op_checks import DTYPES, assert_equal, channels_last, live_bytes
from torch.utils import _pytree as pytree

ops = torch.ops.tsmem
BN = (None, None, True, 0.1, 1e-5, True)


def parameters(c=8, dtype=torch.float64):
    torch.manual_seed(0)
    weights = [torch.randn(c, c, 3, 3, dtype=dtype) / 8 for _ in range(4)]
    norms = [(torch.rand(c, dtype=dtype) + 0.5, torch.randn(c, dtype=dtype)) for _ in range(4)]
    return [t.requires_grad_() for w, n in zip(weights, norms) for t in (w, *n)]


def conv(x, w):
    return ops.conv2d(x, w, None, [1, 1], [1, 1])


def test_views_that_negate_or_are_of_another_type():
    """Of a tensor that is recomputed: an as_strided of it is not them."""
    x, scale, weight = torch.randn(64, 64, dtype=torch.float64), torch.rand(64, dtype=torch.float64), torch.randn(8, 32, dtype=torch.float64)

    def f(product, linear):
        s, w = (t.clone().requires_grad_() for t in (scale, weight))
        y = product(x.clone().requires_grad_() * 1.0, s)
        return torch.autograd.grad(linear(torch.imag(torch.conj(torch.view_as_complex(y.view(64, 32, 2)))), w).square().sum(), (s, w))

    want = f(torch.mul, torch.nn.functional.linear)
    for again in (0, 1):
        torch.testing.assert_close(f(lambda a, b: ops.mul(a, b, again), lambda a, b: ops.linear(a, b, None, again)), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("made", ("negated", "zeros"))
def test_gradients_that_are_lazy(made):
    """The gradient of a conjugate's imaginary part is a negated view; forward-mode's zeros have no memory."""
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3, 5, 6), (3,), (3,)))
    grad = torch.imag(torch.conj(torch.randn(x.shape, dtype=torch.complex128))) if made == "negated" else torch._efficientzerotensor(x.shape, dtype=torch.float64)
    assert grad.is_neg() == (made == "negated")
    for run in (lambda: ops.batch_norm_act(x, weight, bias, *BN, "relu", []), lambda: ops.batch_norm_add_act(x, weight, bias, *BN, x, "relu", []), lambda: ops.mul_act(ops.act(x, "silu", []), x, x, "silu", []),
                lambda: ops.instance_norm_act(x, weight, bias, None, None, True, 0.1, 1e-5, True, "relu", [])):
        out = run()
        assert_equal(torch.autograd.grad(out, x, grad), torch.autograd.grad(run(), x, grad.resolve_neg() if made == "negated" else torch.zeros_like(x)))


def network(x, p, recompute):
    """A stem with a pool, two residual blocks, a concatenation, a product, and an activation of its own."""
    w, g, b = p[0::3], p[1::3], p[2::3]
    z = ops.batch_norm_act_max_pool2d(conv(x, w[0]), g[0], b[0], *BN, "relu", [], [3, 3], [2, 2], [1, 1], [1, 1], False, recompute)
    for i in (1, 2):
        z = ops.batch_norm_add_act(conv(z, w[i]), g[i], b[i], *BN, z, "relu", [], recompute)
    y = ops.batch_norm_act(conv(z, w[3]), g[3], b[3], *BN, "silu", [], recompute)
    y = ops.mul(y, z.mean((2, 3), keepdim=True).sigmoid(), recompute)
    c = ops.cat([z, y], 1, recompute)
    d = ops.act(ops.add(c.permute(0, 2, 3, 1), 0.5 * c.permute(0, 2, 3, 1), 1, recompute), "gelu", [], recompute)
    return ops.linear(d, torch.cat([w[0][:, :, 0, 0], w[1][:, :, 0, 0]], 1))


def gradients(x, p, recompute, f=network):
    out = f(x, p, recompute)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    wanted = [t for t in (x, *p) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, cotangent)]


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("size", (7, 16, 21))
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits(dtype, size, layout):
    p = [t.detach().to(dtype).requires_grad_() for t in parameters()]
    x = torch.randn(3, 8, size, size).to(dtype).to(memory_format=layout).requires_grad_()
    for _ in range(3):
        assert_equal(gradients(x, p, True), gradients(x, p, False))


@pytest.mark.parametrize("frozen", range(12))
def test_partly_frozen(frozen):
    p = parameters()
    p[frozen].requires_grad_(False)
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)
    assert_equal(gradients(x, p, True), gradients(x, p, False))


def test_gradcheck():
    p = parameters(c=2)
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *p: network(x, p, True), (x, *p), atol=1e-6)


def chain(x, p, recompute, blocks=12):
    for i in range(blocks):
        w, g, b = p[3 * (i % 4) : 3 * (i % 4) + 3]
        x = ops.batch_norm_add_act(conv(x, w), g, b, *BN, x, "relu", [], recompute)
    return x


def test_long_chains_are_cut():
    p = parameters()
    x = torch.randn(2, 8, 32, 32, dtype=torch.float64)
    assert_equal(gradients(x, p, True, chain), gradients(x, p, False, chain))
    unit = x.numel() * 8
    ops_level, regions = (live_bytes(lambda r=r: chain(x, p, r)) for r in (False, True))
    assert ops_level > 22 * unit  # a conv output and a block output each
    assert regions < 15 * unit  # the conv outputs, and a block output each eight blocks


def ran(f, name):
    """f(), and how often the operator of this name ran in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        result = f()
    return result, sum(e.name == name for e in profile.events())


def in_backward(f, x, p, recompute, name):
    """The gradients of f, and how often the operator ran to make them."""
    out = f(x, p, recompute).square().sum()
    return ran(lambda: torch.autograd.grad(out, [x, *(t for t in p if t.requires_grad)], allow_unused=True), name)


def dense(x, p, recompute, layers=5):
    """Every layer reads what all before it gave, as in a DenseNet; the first piece is recomputed itself."""
    pieces = [ops.batch_norm_act(conv(x, p[0]), p[1], p[2], *BN, "silu", [], recompute)]
    for i in range(layers):
        c = 8 * (i + 1)
        g = torch.linspace(0.5, 1.5, c, dtype=x.dtype).requires_grad_()
        y = ops.batch_norm_act(ops.cat(pieces, 1, recompute), g, g - 1, *BN, "relu", [], recompute)
        pieces.append(conv(y, p[3].repeat(1, i + 1, 1, 1) / (i + 1)))
    return torch.cat(pieces, 1)


def skip(x, p, recompute, between=20):
    """What the first block gives is read by the next one and, far from it, by the last."""
    early = ops.batch_norm_act(conv(x, p[0]), p[1], p[2], *BN, "silu", [], recompute)
    z = early
    for _ in range(between):
        z = conv(z, p[3])
    return conv(ops.cat([z, early], 1, recompute), p[6].repeat(1, 2, 1, 1))


def test_neighbours_share_what_is_recomputed():
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64, requires_grad=True)
    apply = "tsmem::_batch_norm_act_apply"
    # The norm's own backward and the convolution's read the same concatenation, and all of them the first piece.
    for name, shared, each in (("aten::cat", 5, 10), (apply, 5 + 1, 5 + 10)):
        (a, once), (b, often) = (in_backward(dense, x, p, r, name) for r in (1, 2))
        assert (once, often) == (shared, each)
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    # A chain of seven blocks: from the last to the first, and every second one from the one before it.
    (a, once), (b, often) = (in_backward(lambda *f: chain(*f, blocks=8), x, p, r, apply) for r in (1, 2))
    assert often == 7 * 8 / 2 and 7 <= once <= 7 + 5 + 3 + 1
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_far_users_share_nothing():
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64, requires_grad=True)
    (a, far), (b, near) = (in_backward(lambda *f: skip(*f, between=n), x, p, 1, "tsmem::_batch_norm_act_apply") for n in (20, 4))
    assert (far, near) == (2, 1)

    class Skip(torch.nn.Module):
        def __init__(self, recompute):
            super().__init__()
            self.recompute = recompute

        def forward(self, x):
            return skip(x, p, self.recompute)

    held, anew = (allocator.memory(Skip(r), (x,)).peak for r in (1, 2))
    assert held <= anew + 4096


def test_shared_values_go_with_their_pass():
    p = parameters()
    x = torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    for f in (dense, lambda *a: chain(*a, blocks=8), skip):
        out = f(x, p, 1).square().sum()
        expected = torch.autograd.grad(out, [x, p[0]], retain_graph=True)
        for wanted in ([p[9]], [p[3]], [x, p[0]]):
            assert bytes_left(lambda: torch.autograd.grad(out, wanted, retain_graph=True, allow_unused=True)) < 0.1 * x.nbytes
        assert_equal(torch.autograd.grad(out, [x, p[0]]), expected)


def test_keeps_conv_outputs_alone():
    p = parameters()
    x = torch.randn(2, 8, 32, 32, dtype=torch.float64)

    def plain(recompute):
        z = x
        for i in range(4):
            w, g, b = p[3 * i : 3 * i + 3]
            z = ops.batch_norm_act(conv(z, w), g, b, *BN, "silu", [], recompute)
        return z

    unit = x.numel() * 8
    assert live_bytes(lambda: plain(False)) > 6.9 * unit
    assert live_bytes(lambda: plain(True)) < 4.1 * unit


def test_cat_keeps_its_pieces_once():
    p = parameters()
    x = torch.randn(2, 8, 32, 32, dtype=torch.float64)
    w = [torch.randn(8, 8 * (i + 1), 3, 3, dtype=torch.float64, requires_grad=True) for i in range(6)]

    def dense(recompute):
        features = [conv(x, p[0])]
        for i in range(6):
            features.append(conv(ops.cat(features, 1, recompute), w[i]))
        return ops.cat(features, 1, recompute)

    unit = x.numel() * 8
    assert live_bytes(lambda: dense(False)) > 20 * unit
    assert live_bytes(lambda: dense(True)) == 7 * unit
    grads = [torch.autograd.grad(dense(r).square().sum(), w) for r in (False, True)]
    assert_equal(grads[1], grads[0])


def test_many_little_pieces_are_made_again():
    """Each is little beside the whole, and all are as much as it: of embeddings, which are made again, none is kept."""
    table, weight = torch.randn(50, 32, requires_grad=True), torch.randn(16, 64 * 32, requires_grad=True)
    ids = torch.randint(50, (64, 128))

    def run(recompute):
        return ops.linear(ops.cat([ops.embedding(table, ids[i], -1, False, False, recompute) for i in range(64)], 1, recompute), weight, None, recompute)

    whole = 64 * 128 * 32 * 4
    assert live_bytes(lambda: run(False)) >= whole
    assert live_bytes(lambda: run(True)) < 0.1 * whole
    grads = [torch.autograd.grad(run(r).square().sum(), [table, weight]) for r in (False, True)]
    assert_equal(grads[1], grads[0])


def test_cat_lets_go_of_its_pieces():
    """The pieces go with the output, not at some later call; and no alias of it keeps them."""
    w = torch.randn(8, 8, 3, 3, requires_grad=True)
    pieces = []

    def run():
        y = conv(torch.randn(2, 8, 32, 32), w)
        pieces.append(weakref.ref(y))
        return ops.cat([y, y], 1, True)

    out = run()
    assert pieces[0]() is not None
    out = out.detach()
    gc.collect()
    assert pieces[0]() is None


def test_frozen_keeps_less():
    """In eval mode with nothing to train, no recipe makes anybody keep what level ops would not."""
    c = 8
    stats = (torch.zeros(c), torch.ones(c), False, 0.1, 1e-5, True)
    w = torch.randn(c, c, 3, 3)

    def run(recompute):
        z = torch.randn(2, c, 32, 32, requires_grad=True)
        for _ in range(4):
            z = ops.batch_norm_act(conv(z, w), None, None, *stats, "relu", [], recompute)
        return z

    assert live_bytes(lambda: run(True)) <= live_bytes(lambda: run(False)) + 1024


class Squared(torch.autograd.Function):
    """A Function of Python that keeps tensors both ways."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach().clone())
        ctx.attribute = x.detach().clone()
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("run_backward", (False, True))
@pytest.mark.parametrize("before", (torch.sigmoid, torch.exp, lambda x: torch.nn.functional.gelu(x) * 2, Squared.apply))
def test_a_graph_that_is_gone_leaves_nothing(before, run_backward):
    """What is known of a node refers to it weakly: neither what it keeps nor what the nodes before it keep stays."""
    _, g, b = parameters()[:3]
    x = torch.randn(2, 8, 32, 32, dtype=torch.float64, requires_grad=True)

    def step():
        y = ops.batch_norm_act(before(x), g, b, *BN, "silu", [], True)
        loss = (y * ops.mul(y, y.sigmoid(), True)).sum()
        if run_backward:
            torch.autograd.grad(loss, x)
        del y, loss
        gc.collect()
        return torch.zeros(1)

    assert live_bytes(step) == 0


def test_two_losses_and_retain_graph():
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)

    def grads(recompute):
        out = network(x, p, recompute)
        first = torch.autograd.grad(out.sum(), p, retain_graph=True)
        second = torch.autograd.grad(out.square().sum(), p, retain_graph=True)
        part = torch.autograd.grad(out.sum(), p[6:8], retain_graph=True)
        out.square().sum().backward()
        return [*first, *second, *part, *(t.grad for t in p)]

    expected = [g.clone() for g in grads(False)]
    for t in p:
        t.grad = None
    assert_equal(grads(True), expected)


def test_heads_on_one_trunk():
    """The first loss frees the trunk's own buffers; a head that only reads the trunk's output still has what it needs."""
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)

    def grads(recompute):
        trunk = ops.batch_norm_act(conv(x, p[0]), p[1], p[2], *BN, "relu", [], recompute)
        a, b = conv(trunk, p[3]), conv(trunk, p[6])
        return [*torch.autograd.grad(a.sum(), (p[0], p[3])), *torch.autograd.grad(b.sum(), p[6])]

    assert_equal(grads(True), grads(False))


def test_freed_graph_says_so():
    p = parameters()
    out = network(torch.randn(2, 8, 16, 16, dtype=torch.float64), p, True).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


@pytest.mark.parametrize("which", (1, 2))
def test_parameter_changed_in_place(which):
    """The convolution reads the norm's parameters only to recompute its input: changing them is an error all the same."""
    p = parameters()
    z = ops.batch_norm_act(conv(torch.randn(2, 8, 16, 16, dtype=torch.float64), p[0]), p[1], p[2], *BN, "relu", [], True)
    out = conv(z, p[3])
    with torch.no_grad():
        p[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), p[3])


def test_sources_changed_in_place_have_a_sentence_of_their_own():
    """What PyTorch would have copied has PyTorch's words and ours; what PyTorch keeps as well has PyTorch's alone."""
    ours = "tsmem: a source of a recomputed tensor was changed in place"
    for changed, said in ((1, True), (3, False)):
        p = parameters()
        x = torch.randn(2, 8, 16, 16, dtype=torch.float64)
        z = ops.batch_norm_act(conv(x, p[0]), p[1], p[2], *BN, "relu", [], True)
        out = conv(z, p[3])
        with torch.no_grad():
            p[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            torch.autograd.grad(out.sum(), (p[3], p[0]))
        assert (ours in str(error.value)) == said


def test_output_changed_in_place_is_kept():
    """What is no longer the recipe's result is not made by it."""
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)

    def grads(recompute):
        z = ops.batch_norm_act(conv(x, p[0]), p[1], p[2], *BN, "relu", [], recompute)
        z.detach().mul_(2)
        scaled = ops.batch_norm_act(conv(x, p[3]), p[4], p[5], *BN, "silu", [], recompute)
        scaled.mul_(3)
        return torch.autograd.grad(conv(z, p[6]).sum() + conv(scaled, p[9]).sum(), (p[6], p[9], p[3]))

    assert_equal(grads(True), grads(False))


def test_source_changed_in_place():
    """The conv output is changed between the norm and its user: the recipe is void, and the norm's own backward says so."""
    p = parameters()
    y = conv(torch.randn(2, 8, 16, 16, dtype=torch.float64), p[0])
    z = ops.batch_norm_act(y, p[1], p[2], *BN, "relu", [], True)
    y.detach().mul_(2)
    out = conv(z, p[3])
    assert torch.equal(torch.autograd.grad(out.sum(), p[3], retain_graph=True)[0], torch.nn.grad.conv2d_weight(z, p[3].shape, torch.ones_like(out), 1, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), p[0])


@pytest.mark.parametrize("reentrant", (False, True))
def test_under_torch_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint

    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64, requires_grad=True)
    out = checkpoint(lambda x: network(x, p, True), x, use_reentrant=reentrant)
    out.square().sum().backward()
    actual = [t.grad.clone() for t in p]
    assert_equal(actual, torch.autograd.grad(network(x, p, False).square().sum(), p))


def test_under_save_on_cpu():
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)
    with torch.autograd.graph.save_on_cpu():
        out = network(x, p, True)
    assert_equal(torch.autograd.grad(out.square().sum(), p), torch.autograd.grad(network(x, p, False).square().sum(), p))


def test_backward_in_another_thread():
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)
    out, result = network(x, p, True), []
    thread = threading.Thread(target=lambda: result.extend(torch.autograd.grad(out.square().sum(), p)))
    thread.start()
    thread.join()
    assert_equal(result, torch.autograd.grad(network(x, p, False).square().sum(), p))


def test_many_threads():
    p = [t.detach() for t in parameters()]
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)
    expected = gradients(x, [t.requires_grad_() for t in p], False)
    results = [None] * 4

    def work(i):
        for _ in range(5):
            results[i] = gradients(x, [t.detach().requires_grad_() for t in p], True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r in results:
        assert_equal(r, expected)


def test_gradients_that_others_hold_are_left_alone():
    """A gradient that the user has asked for is not overwritten by the next node."""
    p = parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64)

    def run(recompute):
        z = ops.batch_norm_act(conv(x, p[0]), p[1], p[2], *BN, "relu", [], recompute)
        other = ops.batch_norm_add_act(conv(z, p[3]), p[4], p[5], *BN, z, "relu", [], recompute)
        z.retain_grad()
        other.retain_grad()
        seen = []
        other.register_hook(lambda g: seen.append(g))
        cotangent = torch.randn_like(other, generator=torch.Generator().manual_seed(3)) if False else torch.arange(other.numel(), dtype=torch.float64).view_as(other) % 7
        kept = cotangent.clone()
        other.backward(cotangent)
        assert torch.equal(cotangent, kept)
        assert torch.equal(seen[0], kept) and torch.equal(other.grad, kept)
        return [z.grad, other.grad]

    pytorch_z = torch.nn.functional.relu(torch.nn.functional.batch_norm(torch.nn.functional.conv2d(x, p[0], None, 1, 1), None, None, p[1], p[2], True))
    pytorch_z.retain_grad()
    out = torch.nn.functional.relu(torch.nn.functional.batch_norm(torch.nn.functional.conv2d(pytorch_z, p[3], None, 1, 1), None, None, p[4], p[5], True) + pytorch_z)
    out.backward(torch.arange(out.numel(), dtype=torch.float64).view_as(out) % 7)
    for r in (False, True):
        torch.testing.assert_close(run(r)[0], pytorch_z.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("act,args", (("leaky_relu", [0.1]), ("relu", []), ("silu", []), ("identity", [])))
@pytest.mark.parametrize("size", (5, 16, 19))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", (False, True))
def test_gradient_in_place(dtype, size, act, args, last):
    """The gradient's memory serves for the result: same bits as with a gradient that somebody holds."""
    torch.manual_seed(0)
    y, z = (torch.randn(2, 24, size, size).to(dtype) for _ in range(2))
    if last:
        y, z = channels_last(y), channels_last(z)
    y.requires_grad_(), z.requires_grad_()
    g, b = torch.rand(24).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()

    def grads(f, hold):
        out = f()
        doubled = out * 2  # its gradient is a fresh tensor
        if hold:
            held = []
            out.register_hook(lambda t: held.append(t))
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        if last:
            cotangent = channels_last(cotangent)
        return torch.autograd.grad(doubled, [t for t in (y, z, g, b)], cotangent, allow_unused=True)

    for f in (lambda: ops.batch_norm_act(y, g, b, *BN, act, args), lambda: ops.batch_norm_add_act(y, g, b, *BN, z, act, args),
              lambda: ops.act(y * z, act, args)):  # fmt: skip
        for a, e in zip(grads(f, False), grads(f, True)):
            assert (a is None) == (e is None)
            if a is not None:
                assert torch.equal(a, e)


@pytest.mark.parametrize("act", ("gelu", "gelu_tanh", "silu"))
def test_gradient_of_a_linear_layer_in_place(act):
    """A gradient that is a view of a product which nobody else has: its memory serves for the result too."""
    x, w = torch.randn(2, 64, 32, requires_grad=True), torch.randn(48, 96, requires_grad=True)
    first = torch.randn(96, 32, requires_grad=True)

    def step(hold):
        h = ops.linear(x, first, None, 1)
        y = ops.act(h, act, [], 1)
        if hold:
            y.register_hook(lambda t: held.append(t))
        loss = ops.linear(y, w, None, 1).sum()
        del h, y
        return loss

    taken = {}
    for hold in (False, True):
        held = []
        loss = step(hold)
        with allocator.recorded() as p:
            loss.backward()
        names = (f"aten::{act}_backward", "aten::gelu_backward", "tsmem::_smooth_act_backward")
        taken[hold] = [e.cpu_memory_usage for e in p.events() if e.name in names]
    assert taken == {False: [0], True: [2 * 64 * 96 * 4]}


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("shape", ((3, 5), (2, 3, 5), (2, 2, 3, 5)))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_linear(shape, bias, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype), torch.randn(4, 5).to(dtype), torch.randn(4).to(dtype) if bias else None]
    for bits in range(8 if bias else 4):
        inputs = [None if t is None else t.clone().requires_grad_(bool(bits >> i & 1)) for i, t in enumerate(tensors)]
        outs = [f(*inputs) for f in (ops.linear, torch.nn.functional.linear)]
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        assert torch.equal(*outs)
        if wanted:
            cotangent = torch.randn_like(outs[0])
            for a, e in zip(*(torch.autograd.grad(o, wanted, cotangent) for o in outs)):
                torch.testing.assert_close(a, e, **({} if dtype != torch.bfloat16 else {"rtol": 2e-2, "atol": 2e-2}))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ops.linear, (x, torch.randn(4, 5, dtype=torch.float64, requires_grad=True)))


@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_layer_and_group_norm(affine, dtype):
    torch.manual_seed(0)
    for op, pytorch, shape, argument, c in (
        (ops.layer_norm, torch.nn.functional.layer_norm, (2, 6, 8), [8], (8,)),
        (ops.layer_norm, torch.nn.functional.layer_norm, (2, 6, 8), [6, 8], (6, 8)),
        (ops.group_norm, torch.nn.functional.group_norm, (2, 6, 5, 3), 3, (6,)),
    ):
        x = torch.randn(shape).to(dtype).requires_grad_()
        w, b = (torch.randn(c).to(dtype).requires_grad_() if affine else None for _ in range(2))
        outs = [op(x, argument, w, b, 1e-5, True, True), pytorch(x, argument, w, b, 1e-5)]
        assert torch.equal(*outs)
        cotangent = torch.randn_like(outs[0])
        wanted = [t for t in (x, w, b) if t is not None]
        for a, e in zip(*(torch.autograd.grad(o, wanted, cotangent, retain_graph=True) for o in outs)):
            assert torch.equal(a, e)
        if dtype == torch.float64:
            inputs = [x, *(t for t in (w, b) if t is not None)]
            assert torch.autograd.gradgradcheck(lambda x, w=None, b=None: op(x, argument, w, b, 1e-5, True, True), inputs)  # noqa: B023


@pytest.mark.parametrize("name", ("gelu", "gelu_tanh", "silu", "softplus", "mish", "elu", "relu", "tanh"))
def test_a_kept_activation_makes_its_input_again(name):
    """-1, as plans write it: the output is kept, and what it is made from is not."""
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    args = {"softplus": [1.0, 20.0], "elu": [1.0, 1.0, 1.0]}.get(name, [])

    def live(recompute):
        return ops.act(ops.group_norm(x, 4, None, None, 1e-5, True, 1), name, args, recompute)

    assert live_bytes(lambda: live(-1)) <= x.numel() // 2  # statistics and one bit an element
    if name == "gelu":
        assert live_bytes(lambda: live(0)) >= 4 * x.numel()
    for r in (-1, 1):
        (a,), (b,) = (torch.autograd.grad(live(k).sum(), x) for k in (r, 0))
        torch.testing.assert_close(a, b)


def test_norm_outputs_are_recomputed():
    x = torch.randn(4, 64, 32, requires_grad=True)
    w = [torch.randn(32, 32, requires_grad=True) for _ in range(2)]

    def run(recompute):
        z = ops.layer_norm(x * 1.0, [32], None, None, 1e-5, True, recompute)
        return ops.linear(ops.act(ops.linear(z, w[0]), "gelu", [], recompute), w[1])

    unit = x.numel() * 4
    grads = [torch.autograd.grad(run(r).square().sum(), [x, *w]) for r in (False, True)]
    for a, e in zip(*grads):
        assert torch.equal(a, e)
    assert live_bytes(lambda: run(False)) - live_bytes(lambda: run(True)) > 1.9 * unit


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((5, 1500, 8), (7001, 40), (3, 5, 8)))
def test_made_in_blocks_of_rows(shape, dtype):
    """A linear layer's input, for its weight's gradient; in the narrow dtypes and where there are few rows at once."""
    torch.manual_seed(0)
    c = shape[-1]
    x = torch.randn(shape).to(dtype).requires_grad_()
    w = [torch.randn(n, c).to(dtype).requires_grad_() for n in (c, 3, 2)]
    a, b = (torch.randn(c).to(dtype).requires_grad_() for _ in range(2))

    def run(r):
        y = ops.linear(x, w[0])
        normed = ops.layer_norm(y, [c], a, b, 1e-5, True, r)
        strided = ops.act(y.transpose(0, -2).contiguous().transpose(0, -2), "silu", [], r)
        return ops.linear(ops.act(normed, "gelu", [], r), w[1]).square().sum() + ops.linear(ops.act(strided, "tanh", [], r), w[2]).sum()

    actual, expected = (torch.autograd.grad(run(r), [x, *w, a, b]) for r in (1, 0))
    for u, v in zip(actual, expected):
        assert float((u - v).abs().max()) <= (1e-12 if dtype == torch.float64 else 2e-5) * float(v.abs().max())


def test_blocks_of_rows_need_little_memory():
    x, w = torch.randn(40000, 64, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    whole = x.numel() * 4
    peaks = []
    for r in (1, 0):
        loss = ops.linear(ops.act(x * 1.0, "silu", [], r), w).sum()
        peaks.append(allocator.most_held(lambda: torch.autograd.grad(loss, w)))
    assert peaks[0] < peaks[1] + whole / 4  # not a whole output more than where it is kept


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("scale", ((6, 1, 1), (2, 6, 1, 1), (1, 6, 1, 1), (5,), (2, 1, 1, 1), (1,), (4, 5), (2, 6, 4, 5), ()))
def test_mul_with_broadcasting(scale, dtype):
    torch.manual_seed(0)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 6, 4, 5).to(dtype).contiguous(memory_format=layout)
        for a, b in ((x, torch.randn(scale).to(dtype)), (torch.randn(scale).to(dtype), x)):
            for bits in range(1, 4):
                leaves = [t.clone().requires_grad_(bool(bits >> i & 1)) for i, t in enumerate((a, b))]
                wanted = [t for t in leaves if t.requires_grad]
                outs = [f(*leaves) for f in (ops.mul, torch.mul)]
                assert torch.equal(*outs)
                g = torch.randn_like(outs[0])
                actual = torch.autograd.grad(outs[0], wanted, g.clone())
                expected = torch.autograd.grad(leaves[0].double() * leaves[1].double(), wanted, g.double())
                for u, v in zip(actual, expected):
                    assert u.dtype == dtype and u.shape == v.shape
                    torch.testing.assert_close(u, v, rtol=4 * torch.finfo(dtype).eps, atol=40 * torch.finfo(dtype).eps)
    twice = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 6, 4, 5), scale)]
    assert torch.autograd.gradgradcheck(ops.mul, twice)


@pytest.mark.parametrize("p", (0.3,))
def test_dropout_is_drawn_again(p):
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    w = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    grads = []
    for r in (False, True):
        torch.manual_seed(5)
        z = ops.dropout(ops.act(ops.linear(x, w), "silu", [], r), p, True, False, r)
        state = torch.get_rng_state()
        grads.append(torch.autograd.grad(ops.linear(z, w).square().sum(), (x, w)))
        assert torch.equal(torch.get_rng_state(), state)
    assert_equal(grads[1], grads[0])


def test_scripted_four_calls():
    class M(torch.nn.Module):
        def forward(self, x, w, g, b):
            y = torch.ops.tsmem.conv2d(x, w, None, [1, 1], [1, 1])
            z = torch.ops.tsmem.batch_norm_act(y, g, b, None, None, True, 0.1, 1e-5, True, "relu", [], True)
            return torch.ops.tsmem.conv2d(torch.ops.tsmem.cat([z, z], 1, True), torch.cat([w, w], 1), None, [1, 1], [1, 1])

    m, p = torch.jit.script(M()), parameters()
    x = torch.randn(2, 8, 16, 16, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(M()(x, *p[:3]).square().sum(), [x, *p[:3]])
    for _ in range(4):
        assert_equal(torch.autograd.grad(m(x, *p[:3]).square().sum(), [x, *p[:3]]), expected)


# Expensive outputs: of convolutions and linear layers.

MANY = (2, 8, 16, 16)


def expensive(x, w, recompute):
    return ops.conv2d(x, w, None, [1, 1], [1, 1], [1, 1], 1, recompute)


def blocks(x, p, again):
    """conv-bn-relu, then conv-bn-add-silu on it, twice; again: whether each output is recomputed, two a block."""
    for i in range(len(again) // 2):
        w, g, b = p[3 * i : 3 * i + 3]
        y = expensive(x, w, again[2 * i])
        if i % 2:
            x = ops.batch_norm_add_act(y, g, b, *BN, x, "silu", [], again[2 * i + 1])
        else:
            x = ops.batch_norm_act(y, g, b, *BN, "relu", [], again[2 * i + 1])
    return x


def all_again(x, p, recompute):
    return blocks(x, p, [int(recompute)] * 8)


def convolutions(f):
    return ran(f, "aten::convolution")


def bytes_left(f):
    """Bytes that are allocated in f() and not released by its end, without its result's."""
    with allocator.recorded() as profile:
        result = f()
    return sum(e.self_cpu_memory_usage for e in profile.events()) - sum(t.nbytes for t in result if t is not None)


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("size", (7, 16, 21))
@pytest.mark.parametrize("dtype", DTYPES)
def test_expensive_same_bits(dtype, size, layout):
    p = [t.detach().to(dtype).requires_grad_() for t in parameters()]
    x = torch.randn(3, 8, size, size).to(dtype).to(memory_format=layout).requires_grad_()
    for _ in range(2):
        assert_equal(gradients(x, p, True, all_again), gradients(x, p, False, all_again))


def test_every_choice():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    expected = gradients(x, p[:9], None, lambda x, p, _: blocks(x, p, [0] * 6))
    for bits in range(64):
        again = [7 if bits >> i & 1 else -7 * (i % 2) for i in range(6)]  # any positive number; 0 and negative ones keep
        assert_equal(gradients(x, p[:9], None, lambda x, p, _: blocks(x, p, again)), expected)


@pytest.mark.parametrize("frozen", range(6))
def test_expensive_partly_frozen(frozen):
    p = parameters()
    for i in range(frozen, 12, 6):
        p[i].requires_grad_(False)
    for needs in (False, True):
        x = torch.randn(*MANY, dtype=torch.float64, requires_grad=needs)
        assert_equal(gradients(x, p, True, all_again), gradients(x, p, False, all_again))


def kinds(d):
    """name -> how to call each op of d dimensions with (input, weight, bias, recompute), and whether it's transposed."""
    one, two, zero = [1] * d, [2] * d, [0] * d
    conv = getattr(ops, f"conv{d}d")
    transpose = getattr(ops, f"conv_transpose{d}d")
    transpose = transpose.default if d == 1 else transpose.input
    flags = [False, False, True]
    return {
        "plain": (lambda x, w, b, r: conv.default(x, w, b, one, one, one, 2, r), False),
        "strided": (lambda x, w, b, r: conv.default(x, w, b, two, two, two, 2, r), False),
        "same": (lambda x, w, b, r: conv.padding(x, w, b, one, "same", one, 2, r), False),
        "valid": (lambda x, w, b, r: conv.padding(x, w, b, two, "valid", one, 2, r), False),
        "transposed": (lambda x, w, b, r: transpose(x, w, b, two, one, one, 2, one, r), True),
        "_convolution": (lambda x, w, b, r: ops._convolution(x, w, b, one, one, one, False, zero, 2, *flags, True, r), False),
        "_convolution, transposed": (lambda x, w, b, r: ops._convolution(x, w, b, two, one, one, True, one, 2, *flags, True, r), True),
        "_convolution_mode": (lambda x, w, b, r: ops._convolution_mode(x, w, b, one, "same", one, 2, r), False),
        "_convolution.deprecated": (lambda x, w, b, r: ops._convolution.deprecated(x, w, b, two, one, one, False, zero, 2, *flags, r), False),
    }


@pytest.mark.parametrize("name", kinds(2))
@pytest.mark.parametrize("d", (1, 2, 3))
def test_every_convolution(d, name):
    """Numbers, and bytes: the output of the convolution is not kept. A kernel of 2 makes the padding 'same' asymmetric."""
    op, transposed = kinds(d)[name]
    torch.manual_seed(0)
    x, g = torch.randn([3, 4] + {1: [900], 2: [31, 29], 3: [9, 11, 10]}[d], dtype=torch.float64), None
    w = torch.randn(([4, 4] if transposed else [8, 2]) + [2, 3, 2][:d], dtype=torch.float64) / 4
    for needs_x, needs_w, bias in ((True, True, True), (True, True, False), (False, True, True), (True, False, True)):
        inputs = [x.requires_grad_(needs_x), w.requires_grad_(needs_w), torch.randn(8, dtype=torch.float64, requires_grad=True) if bias else None]
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        for sample in (inputs[0], inputs[0][0]):
            if sample.dim() == d + 1 and name.startswith("_"):
                continue  # takes no single sample

            def run(r):
                return ops.act(op(sample, *inputs[1:], r), "silu", [], r)

            g = torch.randn(run(0).shape, dtype=torch.float64)
            expected = [run(0).detach(), *torch.autograd.grad(run(0), wanted, g)]
            for r in (1, 3, -1):
                assert_equal([run(r).detach(), *torch.autograd.grad(run(r), wanted, g)], expected)
        if needs_x and needs_w:  # batched: a single sample's batch is nobody's but the convolution's
            sample = inputs[0]
            kept, again = (live_bytes(lambda: run(r)) for r in (-1, 1))
            assert kept - again > 0.9 * run(0).nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
def test_expensive_linear(bias, dtype):
    torch.manual_seed(0)
    x, w = torch.randn(6, 30, 24).to(dtype).requires_grad_(), [(torch.randn(24, 24) / 5).to(dtype).requires_grad_() for _ in range(3)]
    b = torch.randn(24).to(dtype).requires_grad_() if bias else None

    def run(r):
        y = x
        for i in range(3):
            y = ops.act(ops.linear(y, w[i], b, r), "gelu", [], r)
        return y

    grads = [torch.autograd.grad(run(r).square().sum(), [x, *w] + [b] * bias) for r in (1, 0)]
    assert_equal(*grads)
    assert live_bytes(lambda: run(1)) < 1024 < 5 * x.nbytes <= live_bytes(lambda: run(0))


def test_expensive_is_not_kept():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    unit = x.nbytes
    assert live_bytes(lambda: all_again(x, p, False)) > 6.9 * unit
    assert live_bytes(lambda: all_again(x, p, True)) < 0.3 * unit
    outputs = []

    def run(r):
        y = expensive(x, p[0], r)
        outputs.append(weakref.ref(y))
        return ops.batch_norm_act(y, p[1], p[2], *BN, "relu", [], r)

    for r in (False, True):
        z = run(r)
        gc.collect()
        assert (outputs[-1]() is None) == r
        del z


def test_made_once_in_a_pass():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)

    def run(r):
        y = expensive(x, p[0], r)
        a = ops.batch_norm_act(y, p[1], p[2], *BN, "silu", [], r)
        b = ops.act(y, "gelu", [], r)
        return ops.mul(a, b, r) + expensive(b, p[3], 0) + expensive(a, p[6], 0) + ops.mul(y, a, r)

    for retain in (True, True, False):
        out = run(1) if retain else out
        _, ran = convolutions(lambda: torch.autograd.grad(out.square().sum(), [x, *p[:3]], retain_graph=retain))
        assert ran == 1
    assert convolutions(lambda: torch.autograd.grad(run(0).square().sum(), [x, *p[:3]]))[1] == 3  # forward's
    _, ran = convolutions(lambda: torch.autograd.grad(all_again(x, p, True).sum(), [x, *p]))
    assert ran == 8
    assert_equal(*(torch.autograd.grad(run(r).square().sum(), [x, *p[:3]]) for r in (1, 0)))


def test_expensive_retain_graph_and_parts():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)

    def grads(r):
        out = all_again(x, p, r)
        found = [torch.autograd.grad(out.sum(), p[i:], retain_graph=True) for i in (9, 0, 4)]
        found += [torch.autograd.grad(out.square().sum(), [x], retain_graph=True) for _ in range(2)]
        found.append(torch.autograd.grad(out.square().sum(), p[::3]))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out.sum(), p)
        return [g for part in found for g in part]

    assert_equal(grads(True), grads(False))


@pytest.mark.parametrize("first", (11, 6, 3, 0))
def test_nothing_stays_after_a_part(first):
    """What a pass has made goes with it, also where the backward of the op that made it is no part of it."""
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    out = all_again(x, p, True).sum()
    for _ in range(2):
        assert bytes_left(lambda: torch.autograd.grad(out, p[first:], retain_graph=True)) < 0.1 * x.nbytes


def test_nothing_stays_after_an_error():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    y = expensive(x, p[0], 1)

    def refuse(g):
        raise ValueError("no")

    y.register_hook(refuse)
    out = expensive(ops.act(y, "silu", [], 1), p[3], 0).sum()
    del y
    expected = torch.autograd.grad(out, p[3], retain_graph=True)
    with pytest.raises(ValueError):
        torch.autograd.grad(out, p[:1], retain_graph=True)
    assert_equal(torch.autograd.grad(out, p[3], retain_graph=True), expected)


def test_two_losses_on_an_expensive_trunk():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)

    def grads(r):
        trunk = ops.batch_norm_act(expensive(x, p[0], r), p[1], p[2], *BN, "silu", [], r)
        a, b = expensive(trunk, p[3], r), expensive(trunk, p[6], r)
        a, b = (ops.act(t, "gelu", [], r) for t in (a, b))
        first = torch.autograd.grad(a.sum(), (p[3],))  # frees its head's buffers, and none of the trunk's
        return [*first, *torch.autograd.grad(b.square().sum(), (x, *p[:3], p[6]))]

    assert_equal(grads(1), grads(0))


@pytest.mark.parametrize("which", range(6))
def test_parameter_of_an_expensive_chain_changed_in_place(which):
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    out = all_again(x, p, True)
    with torch.no_grad():
        (p + [x])[[0, 1, 2, 3, 4, 12][which]].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), p[6:])


@pytest.mark.parametrize("kind", ("leaf", "computed"))
@pytest.mark.parametrize("op", ("conv", "linear"))
def test_bias_changed_in_place(op, kind):
    """No op keeps its bias, so PyTorch's backward would not mind. One that runs again minds, or its output is not made of the new one."""
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    gradient = []
    for r in (0, 1):
        bias = torch.ones(8, dtype=torch.float64, requires_grad=True)
        b = bias if kind == "leaf" else bias * 1
        if op == "conv":
            y = ops.conv2d(x, p[0], b, [1, 1], [1, 1], [1, 1], 1, r)
        else:
            y = ops.linear(x.reshape(-1, 8), p[0][:, :, 0, 0], b, r)
        out = ops.act(y, "silu", [], r)
        del y
        with torch.no_grad():
            b.mul_(3)
        try:
            gradient.append(torch.autograd.grad(out.sum(), p[0])[0])
        except RuntimeError as error:
            assert r == 1 and "modified by an inplace operation" in str(error)
    assert len(gradient) == 1 or torch.equal(*gradient)


def test_running_statistics_changed_in_place():
    """In eval mode: PyTorch's error, or the gradients for the statistics that forward has read."""
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)

    def grads(r, which):
        statistics = [torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)]
        z = ops.batch_norm_act(expensive(x, p[0], r), p[1], p[2], *statistics, False, 0.1, 1e-5, True, "relu", [], r)
        out = ops.act(expensive(z, p[3], r), "silu", [], r)
        del z
        if which is not None:
            statistics[which].add_(1)
        return torch.autograd.grad(out.sum(), p[:4])

    for which in (0, 1):
        try:
            assert_equal(grads(1, which), grads(0, None))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)



VIEWS = {
    "view": lambda y: y.view(32, 4, 6),
    "transpose": lambda y: y.t(),
    "part": lambda y: y[3:],
    "itself": lambda y: y,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("user", ("mul", "add", "act"))
def test_view_of_an_expensive_output(user, view):
    """The memory of what was made once is not overwritten by what is made from a view of it."""
    torch.manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((32, 16), (24, 16)))
    s = torch.randn(VIEWS[view](torch.empty(32, 24)).shape, dtype=torch.float64, requires_grad=True)

    def run(r):
        v = VIEWS[view](ops.linear(x, w, None, r))
        m = {"mul": lambda: ops.mul(v, s, r), "add": lambda: ops.add(v, s, 1, r), "act": lambda: ops.act(v, "silu", [], r)}[user]()
        return ops.act(m, "gelu", [], r).sum() + (ops.act(v, "gelu", [], r) * s).sum()

    found = [torch.autograd.grad(run(r), (x, w, s)) for r in (1, 0)]
    assert_equal(*found)


def test_single_sample_of_an_expensive_convolution():
    """Its output is a view of a batch of one."""
    p, x = parameters(), torch.randn(8, 24, 24, dtype=torch.float64, requires_grad=True)
    s = torch.randn(8, 24, 24, dtype=torch.float64, requires_grad=True)

    def run(r):
        return expensive(ops.mul(expensive(x, p[0], r), s, r), p[3], r).square().sum()

    assert_equal(*(torch.autograd.grad(run(r), (x, s, p[0], p[3])) for r in (1, 0)))


def test_expensive_output_changed_in_place_is_kept():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)

    def grads(r):
        y = expensive(x, p[0], r)
        y.mul_(2)
        z = expensive(x, p[3], r)
        z.detach().add_(1)
        return torch.autograd.grad(ops.act(y, "silu", [], r).sum() + ops.act(z, "gelu", [], r).square().sum(), (x, p[0], p[3]))

    assert_equal(grads(1), grads(0))


def test_expensive_backward_in_another_thread():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    out, results = all_again(x, p, True).square().sum(), [None] * 3

    def work(i):
        results[i] = torch.autograd.grad(out, p, retain_graph=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]  # at once, on one graph
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    expected = torch.autograd.grad(all_again(x, p, False).square().sum(), p)
    for r in results:
        assert_equal(r, expected)


@pytest.mark.parametrize("inside", (False, True))
def test_expensive_under_autocast(inside):
    """Backward runs outside of autocast, or inside it: the same casts either way."""
    p = [t.detach().float().requires_grad_() for t in parameters()]
    x = torch.randn(2, 8, 21, 21, requires_grad=True)
    bias = [torch.randn(8, requires_grad=True) for _ in range(2)]

    def grads(r):
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.conv2d(x, p[0], bias[0], [1, 1], [1, 1], [1, 1], 1, r)
            z = ops.batch_norm_act(y, p[1], p[2], *BN, "silu", [], r)
            z = ops.batch_norm_act(expensive(z, p[3], r), p[4], p[5], *BN, "relu", [], r)
            z = ops.act(ops.linear(z.permute(0, 2, 3, 1), p[6][:, :, 0, 0], bias[1], r), "gelu", [], r)
            out = z.float().square().sum()
            if inside:
                return torch.autograd.grad(out, [x, *p[:7], *bias])
        return torch.autograd.grad(out, [x, *p[:7], *bias])

    for _ in range(2):
        assert_equal(grads(1), grads(0))


@pytest.mark.parametrize("reentrant", (False, True))
def test_expensive_under_torch_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint

    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    z = expensive(x, p[0], 1)  # before, inside and after
    z = checkpoint(lambda z: all_again(z, p, True), ops.act(z, "silu", [], 1), use_reentrant=reentrant)
    ops.act(expensive(z, p[3], 1), "gelu", [], 1).square().sum().backward()
    actual = [t.grad.clone() for t in p]
    z = all_again(ops.act(expensive(x, p[0], 0), "silu", [], 0), p, False)
    assert_equal(actual, torch.autograd.grad(ops.act(expensive(z, p[3], 0), "gelu", [], 0).square().sum(), p))


def test_expensive_under_saved_tensor_hooks():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(all_again(x, p, False).square().sum(), p)
    with torch.autograd.graph.save_on_cpu():
        out = all_again(x, p, True)
    assert_equal(torch.autograd.grad(out.square().sum(), p), expected)
    y = expensive(x, p[0], 1)  # offered before the hooks
    with torch.autograd.graph.save_on_cpu():
        out = ops.act(y, "silu", [], 1)
    assert_equal(torch.autograd.grad(out.sum(), p[0]), torch.autograd.grad(ops.act(expensive(x, p[0], 0), "silu", [], 0).sum(), p[0]))


def test_expensive_second_derivatives():
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    found = []
    for again in (0, 1):
        out = expensive(ops.act(expensive(x, p[0], again), "silu", [], again), p[3], again)
        (g,) = torch.autograd.grad(out.square().sum(), p[3], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), (x, p[0], p[3])))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    small = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 5, 5), (2, 2, 3, 3))]
    assert torch.autograd.gradgradcheck(lambda x, w: expensive(x, w, 1), small)


def test_expensive_gradcheck():
    p = parameters(c=2)
    x = torch.randn(2, 2, 12, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *p: blocks(x.repeat(1, 1, 2, 2), p, [1] * 4), (x, *p[:6]), atol=1e-6, fast_mode=True)


def test_expensive_scripted_four_calls():
    class M(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.again = 1

        def forward(self, x, w, g, b):
            for _ in range(2):
                y = torch.ops.tsmem.conv2d(x, w, None, [1, 1], [1, 1], [1, 1], 1, self.again)
                x = torch.ops.tsmem.batch_norm_act(y, g, b, None, None, True, 0.1, 1e-5, True, "silu", [], self.again)
            return torch.ops.tsmem.linear(x.transpose(1, 3), w[:, :, 0, 0], b, self.again)

    m, p = torch.jit.script(M()), parameters()
    x = torch.randn(*MANY, dtype=torch.float64, requires_grad=True)
    found = {}
    for again in (0, 1):
        m.again = again
        for _ in range(4):
            found.setdefault(again, []).append(torch.autograd.grad(m(x, *p[:3]).square().sum(), [x, *p[:3]]))
        assert live_bytes(lambda: m(x, *p[:3])) < (3.2 if again else 5) * x.nbytes
    for grads in found[0] + found[1]:
        assert_equal(grads, found[0][0])


def test_instance_norm_of_an_expensive_output():
    """The norm looks at a view of the convolution's output."""
    p, x = parameters(), torch.randn(*MANY, dtype=torch.float64, requires_grad=True)

    def run(r):
        z = ops.instance_norm_act(expensive(x, p[0], r), p[1], p[2], None, None, True, 0.1, 1e-5, True, "relu", [], r)
        return ops.act(expensive(z, p[3], r), "silu", [], r).square().sum()

    assert_equal(*(torch.autograd.grad(run(r), (x, *p[:4])) for r in (1, 0)))


# Layers that run again where that is cheap.

CHEAP = 3  # the argument `recompute`


def cheap_layers():
    """Inputs, weights, layers: at most 192 operations for an element of the output, in depthwise ones 24."""
    torch.manual_seed(0)
    x2, x1 = torch.randn(4, 16, 16, 16), torch.randn(4, 16, 64)

    def conv2d(padding, stride=1, groups=1):
        return lambda x, w, r: ops.conv2d(x, w, None, [stride] * 2, [padding] * 2, [1, 1], groups, r)

    return {
        "first of 3 channels": (torch.randn(4, 3, 32, 32), torch.randn(16, 3, 4, 4) / 7, conv2d(1, 2)),
        "conv1d": (x1, torch.randn(64, 16, 1), lambda x, w, r: ops.conv1d(x, w, None, [1], [0], [1], 1, r)),
        "conv2d 1x1": (x2, torch.randn(64, 16, 1, 1), conv2d(0)),
        "conv2d 3x3": (x2, torch.randn(128, 10, 3, 3) / 9, lambda x, w, r: conv2d(1)(x[:, :10].contiguous(), w, r)),
        "depthwise": (x2, torch.randn(16, 1, 3, 3), conv2d(1, 1, 16)),
        "conv3d": (torch.randn(1, 1, 16, 16, 16), torch.randn(16, 1, 3, 3, 3) / 5, lambda x, w, r: ops.conv3d(x, w, None, [1] * 3, [1] * 3, [1] * 3, 1, r)),
        "conv_transpose2d": (x2, torch.randn(16, 32, 2, 2), lambda x, w, r: ops.conv_transpose2d(x, w, None, [2, 2], [0, 0], [0, 0], 1, [1, 1], r)),
        "linear": (torch.randn(256, 96), torch.randn(96, 96) / 10, lambda x, w, r: ops.linear(x, w, None, r)),
        "mm": (torch.randn(256, 96), torch.randn(96, 96) / 10, lambda x, w, r: ops.mm(x, w, r)),
        "addmm": (torch.randn(256, 96), torch.randn(96, 96) / 10, lambda x, w, r: ops.addmm(torch.ones(96), x, w, 1, 1, r)),
        "matmul": (torch.randn(4, 64, 96), torch.randn(96, 96) / 10, lambda x, w, r: ops.matmul(x, w, r)),
    }


@pytest.mark.parametrize("made", [False, True], ids=["from an argument", "from what is made again"])
@pytest.mark.parametrize("name", cheap_layers())
def test_a_cheap_layer_runs_again(name, made):
    x, w, layer = cheap_layers()[name]
    w.requires_grad_()
    x.requires_grad_(made)

    def run(r):
        source = ops.act(x, "silu", [], 1) if made else x
        return ops.act(ops.act(layer(source, w, r), "silu", [], 1), "gelu", [], 1)

    whole = layer(x, w, 0).nbytes
    assert bytes_left(lambda: [run(CHEAP)]) < whole / 4 and bytes_left(lambda: [run(0)]) >= whole
    inputs = (x, w) if made else (w,)
    expected = torch.autograd.grad(run(0).square().sum(), inputs)
    out = run(CHEAP).square().sum()
    for _ in range(2):
        assert_equal(torch.autograd.grad(out, inputs, retain_graph=True), expected)


def expensive_layers():
    torch.manual_seed(0)
    x = torch.randn(4, 16, 16, 16)
    return {
        "many operations": (torch.randn(16, 16, 3, 3), 1, 0, True),  # 288
        "a large depthwise filter": (torch.randn(16, 1, 5, 5), 16, 2, True),  # 50, and no product of matrices
        "a larger input": (torch.randn(8, 16, 1, 1), 1, 0, True),
        "a frozen weight": (torch.randn(64, 16, 1, 1), 1, 0, False),  # nobody keeps the input
    }, x


@pytest.mark.parametrize("name", expensive_layers()[0])
def test_other_layers_are_kept(name):
    layers, x = expensive_layers()
    w, groups, padding, trains = layers[name]
    w.requires_grad_(trains)
    x.requires_grad_()

    def run(r):
        return ops.act(ops.conv2d(x * 1.0, w, None, [1, 1], [padding] * 2, [1, 1], groups, r), "silu", [], 1)

    assert bytes_left(lambda: [run(CHEAP)]) >= run(0).nbytes


def test_a_frozen_layer_runs_again_from_what_others_keep():
    torch.manual_seed(0)
    x, w = torch.randn(4, 16, 16, 16, requires_grad=True), torch.randn(64, 16, 1, 1)

    def run(r):
        return ops.act(ops.conv2d(ops.act(x, "silu", [], 1), w, None, [1, 1], [0, 0], [1, 1], 1, r), "silu", [], 1)

    assert bytes_left(lambda: [run(CHEAP)]) < run(0).nbytes / 4
    assert_equal(*(torch.autograd.grad(run(r).square().sum(), x) for r in (CHEAP, 0)))


@pytest.mark.parametrize("channels, again", [(16, True), (48, False)])
def test_a_depthwise_layer_behind_a_wide_one(channels, again):
    """MobileNet's block: both run again where the first takes half the time of the second at most, else the first alone."""
    torch.manual_seed(0)
    x, w, depthwise = torch.randn(4, channels, 16, 16), torch.randn(64, channels, 1, 1, requires_grad=True), torch.randn(64, 1, 3, 3, requires_grad=True)

    def run(r):
        wide = ops.act(ops.conv2d(x, w, None, [1, 1], [0, 0], [1, 1], 1, r), "relu", [], 1)
        return ops.act(ops.conv2d(wide, depthwise, None, [1, 1], [1, 1], [1, 1], 64, r), "silu", [], 1)

    one = run(0).nbytes
    left = bytes_left(lambda: [run(CHEAP)])
    assert left < one / 2 if again else one <= left < 1.25 * one
    assert_equal(*(torch.autograd.grad(run(r).square().sum(), (w, depthwise)) for r in (CHEAP, 0)))


@pytest.mark.parametrize("wide, again", [(128, True), (64, False)])
def test_a_wider_layer_runs_again_behind_a_narrow_one(wide, again):
    """An MLP's first layer behind attention's last: what runs before it takes half of its time at most."""
    torch.manual_seed(0)
    x, narrow, wider = torch.randn(256, 64), torch.randn(64, 64) / 8, torch.randn(wide, 64) / 8
    scale = torch.ones(64)
    for t in (x, narrow, wider, scale):
        t.requires_grad_()

    def run(r):
        y = ops.layer_norm(ops.add(ops.linear(ops.act(x, "silu", [], 1), narrow, None, r), x, 1, 1), [64], scale, None, 1e-5, True, 1)
        return ops.act(ops.act(ops.linear(y, wider, None, r), "silu", [], 1), "gelu", [], 1)

    assert (bytes_left(lambda: [run(CHEAP)]) < run(0).nbytes / 2) == again
    assert_equal(*(torch.autograd.grad(run(r).square().sum(), (x, narrow, wider, scale)) for r in (CHEAP, 0)))


@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_products_that_are_added_to_one_another_run_again_one_at_a_time(name):
    """The first term of the sum is made again too, so it counts as what the product is made from."""
    torch.manual_seed(0)
    lead = () if name == "addmm" else (2,)
    a, b = torch.randn(*lead, 64, 32, requires_grad=True), torch.randn(*lead, 32, 64, requires_grad=True)

    def run(r):
        total = torch.zeros(64)
        for _ in range(4):
            total = getattr(ops, name)(total, a, b, 1, 1, r)
        return ops.act(total, "gelu", [], 1).square().sum()

    out = run(CHEAP)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out.backward()
    assert sum(e.count for e in seen.key_averages() if e.key == f"aten::{name}") <= 1
    assert_equal(*(torch.autograd.grad(run(r), (a, b)) for r in (CHEAP, 0)))


def convolutions_in_backward(run):
    out = run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out.backward()
    return sum(e.count for e in seen.key_averages() if e.key == "aten::convolution")


def test_a_layer_runs_again_once_for_a_chain_of_residual_blocks():
    """Each block's output is made from those before it: their last layers have users in every later block."""
    torch.manual_seed(0)
    x, first = torch.randn(2, 16, 32, 32), torch.randn(64, 16, 5, 5) / 20
    p = [first, *(torch.randn(c, d, k, k) / (d * k * k) ** 0.5 for _ in range(4) for c, d, k in ((32, 64, 3), (64, 32, 1))), torch.ones(64), torch.zeros(64)]
    for t in p:
        t.requires_grad_()

    def run(r):
        y = ops.conv2d(x, p[0], None, [1, 1], [2, 2], [1, 1], 1, r)
        for narrow, wide in zip(p[1:9:2], p[2:9:2]):
            z = ops.act(ops.conv2d(y, narrow, None, [1, 1], [1, 1], [1, 1], 1, r), "silu", [], 1)
            z = ops.conv2d(z, wide, None, [1, 1], [0, 0], [1, 1], 1, r)
            y = ops.batch_norm_add_act(z, p[-2], p[-1], *BN, y, "relu", [], 1)
        return y.square().sum()

    assert convolutions_in_backward(lambda: run(0)) == 0 and convolutions_in_backward(lambda: run(CHEAP)) == 4
    assert_equal(*(torch.autograd.grad(run(r), p) for r in (CHEAP, 0)))


@pytest.mark.parametrize("between, times", [(2, 1), (20, 2)])
def test_what_a_layer_made_again_is_held_for_users_nearby_alone(between, times):
    """A skip connection across a network runs it twice: held in between it would be there at the peak."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 16, 32, 32), torch.randn(64, 16, 1, 1, requires_grad=True)
    scales = torch.rand(between + 1, 64, 1, 1, requires_grad=True)

    def run(r):
        wide = ops.conv2d(x, w, None, [1, 1], [0, 0], [1, 1], 1, r)
        inner = ops.act(wide, "silu", [], 1)
        for scale in scales[1:]:
            inner = ops.mul(inner.mean((2, 3), True), scale, 1)
        return ops.mul(wide, scales[0], 1).sum() + inner.sum()

    assert convolutions_in_backward(lambda: run(CHEAP)) == times
    assert_equal(*(torch.autograd.grad(run(r), (w, scales)) for r in (CHEAP, 0)))


class TanhAndSigmoid(torch.autograd.Function):
    """One node with two outputs, as what TorchScript differentiates as a group has. It keeps nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.tanh(), x.sigmoid()

    @staticmethod
    def backward(ctx, of_tanh, of_sigmoid):
        return of_tanh + of_sigmoid


def test_every_output_of_a_node_counts_as_kept():
    torch.manual_seed(0)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)

    def run(r):
        return ops.linear(ops.mul(*TanhAndSigmoid.apply(x), r), w)

    assert bytes_left(lambda: [run(0)]) - bytes_left(lambda: [run(1)]) == x.nbytes
    assert_equal(*(torch.autograd.grad(run(r).square().sum(), (x, w)) for r in (1, 0)))


def test_what_is_interpolated_is_kept_in_place_of_the_result():
    """Nobody else keeps it, and it is a quarter as large."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 8, 16, 16, dtype=torch.float64, requires_grad=True), torch.randn(8, 8, 3, 3, dtype=torch.float64, requires_grad=True)

    def run(r):
        return ops.conv2d(ops.upsample_nearest2d(x.tanh() * 2.0, None, [2.0, 2.0], r), w, None, [1, 1], [1, 1])

    left = [bytes_left(lambda: [run(r)]) for r in (1, 0)]
    assert left[0] <= left[1] - x.nbytes * 3 + 4096
    assert_equal(*(torch.autograd.grad(run(r).square().sum(), (x, w)) for r in (1, 0)))


def kept_by_their_own_op():
    """Makes results that their own op keeps, of 2 x 4 x 64 x 64, from an input that nobody else keeps."""

    def attention(t):
        return ops.scaled_dot_product_attention(t, t, t, None, 0.0, False, None, False, 0)

    states = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((192, 64), (192, 64))]
    return {"tanh": lambda t: ops.tanh(t, 1), "exp": lambda t: ops.exp(t, 1), "softmax": lambda t: ops.softmax(t, -1, None, 1), "attention": attention,
            "attention of five dimensions": lambda t: attention(t[None])[0],
            "gru": lambda t: ops.gru(t.view(8, 64, 64), torch.zeros(1, 64, 64, dtype=torch.float64), states, False, 1, 0.0, True, False, False)[0].view(t.shape)}


ONES = torch.ones(64, dtype=torch.float64)
READ_AS = {"as it is": lambda t: t, "transposed": lambda t: t.transpose(2, 3), "a part": lambda t: t[:, 1:]}


def sum_of_a_kept_result(make, view, again):
    """A layer of what is made from the result, which is there no more then; and that layer's weight."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 64, 64, dtype=torch.float64, requires_grad=True), torch.randn(8, 64, dtype=torch.float64, requires_grad=True)
    return ops.linear(ops.add(view(make(Once.apply(x))), ONES, 1, again), w), x, w


class Once(torch.autograd.Function):
    """Keeps nothing, and nobody can make it again."""

    @staticmethod
    def forward(ctx, x):
        return x / 8

    @staticmethod
    def backward(ctx, grad):
        return grad / 8


@pytest.mark.parametrize("view", READ_AS)
@pytest.mark.parametrize("name", kept_by_their_own_op())
def test_made_from_a_result_that_its_own_op_keeps(name, view):
    make = kept_by_their_own_op()[name]
    left = [bytes_left(lambda: sum_of_a_kept_result(make, READ_AS[view], r)) for r in (0, 1)]
    assert left[0] - left[1] == (1.5 if view == "a part" else 2) * 64 * 64 * 4 * 8
    outs = [sum_of_a_kept_result(make, READ_AS[view], r) for r in (0, 1)]
    assert_equal(*(torch.autograd.grad(y.square().sum(), (x, w)) for y, x, w in outs))


@pytest.mark.parametrize("name", ("tanh", "softmax", "attention"))
def test_second_derivatives_through_a_result_that_its_own_op_keeps(name):
    make = kept_by_their_own_op()[name]

    def second(r):
        y, x, w = sum_of_a_kept_result(make, READ_AS["transposed"], r)
        first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))]

    assert_equal(second(1), second(0))


@pytest.mark.parametrize("name", ("tanh", "softmax", "attention"))
def test_a_result_that_its_own_op_keeps_is_not_kept_longer(name):
    """It goes with the last of its users; a graph that is dropped leaves nothing, nor does a leaf made of the result."""
    make = kept_by_their_own_op()[name]

    def passed():
        y, x, w = sum_of_a_kept_result(make, READ_AS["transposed"], 1)
        torch.autograd.grad(y.sum(), (x, w))
        return y.detach()

    def dropped():
        return sum_of_a_kept_result(make, READ_AS["transposed"], 1)[0].detach()

    def detached():
        y = make(Once.apply(torch.randn(2, 4, 64, 64, dtype=torch.float64, requires_grad=True)))
        return y.detach_()

    for f in (passed, dropped, detached):
        assert live_bytes(f) == 0


def test_a_kept_result_changed_in_place():
    """After forward: the layer's input can be made from it no more."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    for wanted in (w, x):
        y = ops.tanh(x * 1.0, 1)
        out = ops.linear(ops.add(y, 1.0, 1, 1), w)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="(?s)modified by an inplace operation.*tsmem: a source of a recomputed tensor was changed in place"):
            torch.autograd.grad(out.sum(), wanted)


def test_a_kept_result_changed_before_it_is_read():
    """What is made from it is made from the new values: it is kept itself."""
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    grads = []
    for r in (0, 1):
        y = ops.tanh(x * 1.0, 1).add_(1)
        grads.append(torch.autograd.grad(ops.linear(ops.add(y, 1.0, 1, r), w).square().sum(), w))
    assert_equal(*grads)


def assert_as_pytorch(run):
    """run(tanh, add, linear) with operators that make again, and with PyTorch's own, which keep."""
    ours, theirs = (lambda t: ops.tanh(t, 1), lambda t: ops.add(t, 1.0, 1, 1), ops.linear), (torch.tanh, lambda t: t + 1.0, torch.nn.functional.linear)
    assert_equal(run(*ours), run(*theirs))


LAID_OUT_ANEW = {
    "turned": lambda y: y.t_(),
    "other data": lambda y: setattr(y, "data", torch.full((64, 64), 0.25, dtype=y.dtype)),
    "set": lambda y: y.set_(torch.full((64, 64), 0.25, dtype=y.dtype)),
}


@pytest.mark.parametrize("when", ("before it is read", "after it"))
@pytest.mark.parametrize("how", LAID_OUT_ANEW)
def test_a_kept_result_that_has_other_memory_or_strides(how, when):
    torch.manual_seed(0)
    x, w = torch.randn(64, 64, dtype=torch.float64), torch.randn(8, 64, dtype=torch.float64, requires_grad=True)

    def run(tanh, sum_, linear):
        y = tanh(x.clone().requires_grad_() * 1)
        z = sum_(y) if when == "after it" else None
        with torch.no_grad():
            LAID_OUT_ANEW[how](y)
        return torch.autograd.grad(linear(z if z is not None else sum_(y), w).square().sum(), w)

    assert_as_pytorch(run)


def test_a_whole_whose_data_is_exchanged_before_its_part_is_used():
    torch.manual_seed(0)
    x, v, w = torch.randn(80, 64, dtype=torch.float64), *(torch.randn(8, 64, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run(_, sum_, linear):
        y = x.clone().requires_grad_() * 1.5
        kept = linear(y, v)
        part = y[8:72]
        z = sum_(part)
        y.data = torch.full((80, 64), 0.25, dtype=y.dtype)
        out = linear(z, w)
        del kept
        return torch.autograd.grad(out.square().sum(), w)

    assert_as_pytorch(run)


@pytest.mark.parametrize("how", ("data", "emptied", "set"))
def test_a_part_of_a_parameter_whose_memory_is_exchanged(how):
    """As FSDP exchanges a flat parameter's, between a forward and its backward."""
    torch.manual_seed(0)
    flat, w = torch.randn(80, 64, dtype=torch.float64), torch.randn(8, 64, dtype=torch.float64, requires_grad=True)

    def run(_, sum_, linear):
        p = flat.clone().requires_grad_()
        out = linear(sum_(p[8:72]), w)
        if how == "set":
            with torch.no_grad():
                p.set_(torch.zeros(80, 64, dtype=torch.float64))
        else:
            p.data = torch.zeros((80, 64) if how == "data" else 0, dtype=torch.float64)
        return torch.autograd.grad(out.square().sum(), w)

    assert_as_pytorch(run)


@pytest.mark.parametrize("kind", ("csr", "coo", "nested"))
def test_parts_of_what_has_no_strides(kind):
    torch.manual_seed(0)
    dense, w = torch.randn(64, 64, dtype=torch.float64), torch.randn(8, 64, dtype=torch.float64, requires_grad=True)

    def run(_, sum_, linear):
        whole = {"csr": dense.to_sparse_csr, "coo": lambda: dense.to_sparse().coalesce(), "nested": lambda: torch.nested.nested_tensor([dense, dense])}[kind]().requires_grad_()
        part = whole.unbind()[0] if kind == "nested" else whole.values().view(64, 64)
        return torch.autograd.grad(linear(sum_(part), w).square().sum(), w)

    assert_as_pytorch(run)


def test_a_small_part_is_no_reason_to_keep_the_whole():
    """Who kept the whole may have gone; what is made from a small part of it is kept itself then."""
    torch.manual_seed(0)
    x, u, w = torch.randn(64, 512), torch.randn(512, 512, requires_grad=True), torch.randn(8, 16, requires_grad=True)

    def run(r):
        y = ops.linear(x, u)
        dropped = ops.linear(y, u)
        del dropped
        return ops.linear(ops.add(y[:, :16], 1.0, 1, r), w)

    assert bytes_left(lambda: [run(1)]) == bytes_left(lambda: [run(0)])


def test_hooks_see_a_kept_result_once():
    seen = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        ops.tanh(x * 1.0, 1)
    assert seen.count(x.shape) == 1


@pytest.mark.parametrize("split", ([16, 16, 8], [40], [1, 39], [0, 12, 28], [4] * 10))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_columns_put_together(dtype, split):
    """Each piece gives its columns of the weight's gradient: the input isn't there as a whole again."""
    torch.manual_seed(0)
    pieces = [torch.randn(4, 300, n).to(dtype).requires_grad_() for n in split]
    w, b = torch.randn(24, 40).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()

    def run(r):
        made = [ops.mul(p.sigmoid(), 1.5, r) for p in pieces]
        out = ops.linear(ops.cat(made, -1, r), w, b)
        return out, torch.autograd.grad(out.square().sum(), (w, b, *pieces))

    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for got, want in zip(*(pytree.tree_leaves(run(r)) for r in (1, 0))):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max([float(v) for v in want.detach().abs().flatten()], default=0))


def test_a_layer_of_columns_second_derivatives():
    torch.manual_seed(0)
    a, b, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((64, 12), (64, 20), (8, 32)))

    def second(r):
        y = ops.linear(ops.cat([a.tanh(), b.tanh()], 1, r), w)
        first = torch.autograd.grad(y.square().sum(), (a, b, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (a, b, w))]

    for got, want in zip(second(1), second(0)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_layer_of_columns_in_forward_mode():
    """A gradient with a tangent, as torch.func.jvp over torch.autograd.grad gives it."""
    torch.manual_seed(0)
    a, b, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((64, 12), (64, 20), (8, 32)))
    grad, tangent = torch.randn(64, 8, dtype=torch.float64), torch.randn(64, 8, dtype=torch.float64)

    def both(r):
        y = ops.linear(ops.cat([a.tanh(), b.tanh()], 1, r), w)
        return torch.func.jvp(lambda g: torch.autograd.grad(y, w, g, retain_graph=True)[0], (grad,), (tangent,))

    assert_equal(both(1), both(0))


def test_a_layer_of_columns_needs_little_memory():
    """In backward: no piece is copied into a whole."""
    a, b, w = (torch.randn(s, requires_grad=True) for s in ((4096, 128), (4096, 128), (8, 256)))

    def peak(r):
        out = ops.linear(ops.cat([a, b], 1, r), w)
        with allocator.recorded() as profile:
            torch.autograd.grad(out.sum(), w)
        return max(e.cpu_memory_usage for e in profile.events())

    assert peak(1) < 1.5 * 4096 * 8 * 4 < 4096 * 256 * 4


def rotated(t, angles, part, r):
    """Rotary embeddings of the first features of each head, as x-transformers and GPT-NeoX have them."""
    turned, rest = t[..., :part], t[..., part:]
    a, b = turned.chunk(2, -1)
    turned = ops.add(ops.mul(turned, angles.cos(), r), ops.mul(ops.cat([ops.neg(b, r), a], -1, r), angles.sin(), r), 1, r)
    return ops.cat([turned, rest], -1, r)


@pytest.mark.parametrize("fused", (False, True))
def test_partly_rotated_attention_keeps_no_more_than_pytorch(fused):
    """A part of a projection that nobody else keeps costs all of it."""
    torch.manual_seed(0)
    x, angles = torch.randn(2, 128, 64, dtype=torch.float64), torch.randn(128, 8, dtype=torch.float64)
    weights = [torch.randn(64, 64, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run(r):
        if fused:
            all_three = ops.linear(x, torch.cat(weights)).view(2, 128, 4, 48)
            q, k, v = (t.transpose(1, 2) for t in all_three.chunk(3, -1))
        else:
            q, k, v = (ops.linear(x, w).view(2, 128, 4, 16).transpose(1, 2) for w in weights)
        return ops.scaled_dot_product_attention(rotated(q, angles, 8, r), rotated(k, angles, 8, r), v, None, 0.0, True)

    left = [bytes_left(lambda: [run(r)]) for r in (0, 1)]
    assert left[1] <= left[0]
    assert_equal(*(torch.autograd.grad(run(r).square().sum(), weights) for r in (0, 1)))
