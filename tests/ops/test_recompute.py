"""Outputs that backward makes again: numbers, what is kept, and that everybody who may interfere is heard."""
import gc
import threading
import weakref

import pytest
import torch
import tsmem  # noqa: F401  loads the operators
from op_checks import DTYPES, assert_equal, channels_last, live_bytes

ops = torch.ops.tsmem
BN = (None, None, True, 0.1, 1e-5, True)


def parameters(c=8, dtype=torch.float64):
    torch.manual_seed(0)
    weights = [torch.randn(c, c, 3, 3, dtype=dtype) / 8 for _ in range(4)]
    norms = [(torch.rand(c, dtype=dtype) + 0.5, torch.randn(c, dtype=dtype)) for _ in range(4)]
    return [t.requires_grad_() for w, n in zip(weights, norms) for t in (w, *n)]


def conv(x, w):
    return ops.conv2d(x, w, None, [1, 1], [1, 1])


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
    """The convolution reads the norm's parameters only to make its input again: changing them is an error all the same."""
    p = parameters()
    z = ops.batch_norm_act(conv(torch.randn(2, 8, 16, 16, dtype=torch.float64), p[0]), p[1], p[2], *BN, "relu", [], True)
    out = conv(z, p[3])
    with torch.no_grad():
        p[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), p[3])


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


def test_second_derivatives_are_refused_by_name():
    p = parameters()
    z = ops.batch_norm_act(conv(torch.randn(2, 8, 16, 16, dtype=torch.float64), p[0]), p[1], p[2], *BN, "relu", [], True)
    (g,) = torch.autograd.grad(conv(z, p[3]).square().sum(), p[3], create_graph=True)
    with pytest.raises(NotImplementedError, match="tsmem::convolution: second derivatives"):
        torch.autograd.grad(g.sum(), p[0])


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

    stock_z = torch.nn.functional.relu(torch.nn.functional.batch_norm(torch.nn.functional.conv2d(x, p[0], None, 1, 1), None, None, p[1], p[2], True))
    stock_z.retain_grad()
    out = torch.nn.functional.relu(torch.nn.functional.batch_norm(torch.nn.functional.conv2d(stock_z, p[3], None, 1, 1), None, None, p[4], p[5], True) + stock_z)
    out.backward(torch.arange(out.numel(), dtype=torch.float64).view_as(out) % 7)
    for r in (False, True):
        torch.testing.assert_close(run(r)[0], stock_z.grad, rtol=1e-10, atol=1e-10)


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

    for f in (lambda: ops.batch_norm_act(y, g, b, *BN, act, args), lambda: ops.batch_norm_add_act(y, g, b, *BN, z, act, args)):
        for a, e in zip(grads(f, False), grads(f, True)):
            assert (a is None) == (e is None)
            if a is not None:
                assert torch.equal(a, e)


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
    for op, stock, shape, argument, c in (
        (ops.layer_norm, torch.nn.functional.layer_norm, (2, 6, 8), [8], (8,)),
        (ops.layer_norm, torch.nn.functional.layer_norm, (2, 6, 8), [6, 8], (6, 8)),
        (ops.group_norm, torch.nn.functional.group_norm, (2, 6, 5, 3), 3, (6,)),
    ):
        x = torch.randn(shape).to(dtype).requires_grad_()
        w, b = (torch.randn(c).to(dtype).requires_grad_() if affine else None for _ in range(2))
        outs = [op(x, argument, w, b, 1e-5, True, True), stock(x, argument, w, b, 1e-5)]
        assert torch.equal(*outs)
        cotangent = torch.randn_like(outs[0])
        wanted = [t for t in (x, w, b) if t is not None]
        for a, e in zip(*(torch.autograd.grad(o, wanted, cotangent, retain_graph=True) for o in outs)):
            assert torch.equal(a, e)
        (g,) = torch.autograd.grad(outs[0], x, cotangent.requires_grad_(), create_graph=True)
        with pytest.raises(NotImplementedError, match=f"tsmem::{op.__name__}: second derivatives"):
            torch.autograd.grad(g.sum(), x)


def test_norm_outputs_are_made_again():
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
