"""Offloaded outputs, with a simulated link between the CPU and its "host": the numbers, what is live when, and the order of the copies."""
import gc
import threading
import time

import allocator
import pytest
import torch
import tsmem  # noqa: F401  loads the operators
from op_checks import channels_last

ops = torch.ops.tsmem
KEEP, OFFLOAD = -1, 4
FAST = 1e15  # bytes a second


@pytest.fixture(autouse=True)
def link():
    """The CPU has a link to a host for the test."""
    ops._simulate_link(FAST)
    yield
    ops._simulate_link(0)


def weights(layers=4, channels=8, dtype=torch.float64):
    return [(torch.randn(channels, channels, 3, 3, dtype=dtype) / 8).requires_grad_() for _ in range(layers)]


def chain(x, weights, fate):
    """Convolutions in a row: backward reads each one's input, the output of the one before."""
    for w in weights:
        x = ops.conv2d(x, w, None, [1, 1], [1, 1], recompute=fate)
    return x


def gradients(fate, x, weights):
    x = x.detach().requires_grad_()
    out = chain(x, weights, fate)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *weights])]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("layout", (torch.Tensor.contiguous, channels_last))
def test_the_numbers_are_the_same(one_thread, dtype, layout):
    x, w = layout(torch.randn(2, 8, 13, 11, dtype=dtype)), weights(dtype=dtype)
    for _ in range(4):
        for a, b in zip(gradients(OFFLOAD, x, w), gradients(KEEP, x, w)):
            assert a.stride() == b.stride() and torch.equal(a, b)
    assert "fetch 1" in ops._link_events()


@pytest.mark.parametrize("op", ("linear", "matmul", "attention", "addmm", "conv1d", "conv_transpose2d"))
def test_every_kind_of_op(one_thread, op):
    torch.manual_seed(1)
    x = torch.randn(8, 24, 32, dtype=torch.float64)
    w = torch.randn(32, 32, dtype=torch.float64, requires_grad=True)

    def layer(x, fate):
        if op == "linear":
            return ops.linear(x, w, None, fate)
        if op == "matmul":
            return ops.matmul(x, w, fate)
        if op == "addmm":
            return ops.addmm(w[0], x.flatten(0, 1), w, recompute=fate).view_as(x)
        if op == "attention":
            q = x.view(8, 1, 24, 32)
            return ops.scaled_dot_product_attention(q, q, q, recompute=fate).view_as(x) * w[0]
        if op == "conv1d":
            return ops.conv1d(x.mT, w[:, :, None], None, recompute=fate).mT
        return ops.conv_transpose2d(x.mT.reshape(8, 32, 24, 1), w[:, :, None, None], None, recompute=fate).reshape(8, 32, 24).mT

    def run(fate):
        y = x.clone().requires_grad_()
        return torch.autograd.grad(layer(layer(layer(y, fate).sin(), fate).sin(), fate).sum(), (y, w))

    for a, b in zip(run(OFFLOAD), run(KEEP)):
        assert torch.equal(a, b)
    assert "offload 2" in ops._link_events()


def test_the_order_of_copies():
    """Forward: two are on their way out. Backward: the last two are there yet; each use fetches what the next two need."""
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights(6)
    out = chain(x, w, OFFLOAD)
    assert ops._link_events() == ["offload 0", "offload 1", "offload 2", "left 0", "offload 3", "left 1", "offload 4", "left 2", "offload 5", "left 3"]
    out.sum().backward()
    assert ops._link_events() == ["left 5", "use 4", "fetch 3", "fetch 2", "left 4", "use 3", "fetch 1", "use 2", "fetch 0", "use 1", "use 0"]


def test_what_is_live():
    """At the end of forward two outputs are on the device yet; without a link all are."""
    x, w = torch.randn(4, 8, 64, 64), weights(8, dtype=torch.float32)

    def at_end(fate):
        with allocator.recorded() as profile:
            out = chain(x, w, fate)
        del out
        return sum(bytes for _, bytes in allocator._allocations(profile)) / x.nbytes

    at_end(KEEP)  # the profiler's first run may miss the first of it
    assert at_end(KEEP) == pytest.approx(8, abs=0.1)
    assert at_end(OFFLOAD) == pytest.approx(2, abs=0.1)
    ops._simulate_link(0)
    assert at_end(OFFLOAD) == pytest.approx(8, abs=0.1)


def test_a_graph_may_be_used_twice(one_thread):
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights()
    out = chain(x, w, OFFLOAD).sum()
    first = torch.autograd.grad(out, w, retain_graph=True)
    for a, b in zip(torch.autograd.grad(out, w), first):
        assert torch.equal(a, b)


def test_two_forwards_before_backward(one_thread):
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights()
    want = torch.autograd.grad(chain(x, w, KEEP).sum() + chain(2 * x, w, KEEP).square().sum(), w)
    for a, b in zip(torch.autograd.grad(chain(x, w, OFFLOAD).sum() + chain(2 * x, w, OFFLOAD).square().sum(), w), want):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_what_was_overwritten_raises():
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights(3)
    for fate in (KEEP, OFFLOAD):
        first = ops.conv2d(x, w[0], None, [1, 1], [1, 1], recompute=fate)
        second = ops.conv2d(first, w[1], None, [1, 1], [1, 1], recompute=fate)
        with torch.no_grad():
            first.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.sum().backward()


def test_overwritten_before_it_is_used(one_thread):
    """conv, relu_, conv: what the second one keeps is not what was copied."""
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights(2)

    def run(fate):
        y = ops.conv2d(x, w[0], None, [1, 1], [1, 1], recompute=fate).relu_()
        return torch.autograd.grad(ops.conv2d(y, w[1], None, [1, 1], [1, 1], recompute=fate).sum(), w)

    for a, b in zip(run(OFFLOAD), run(KEEP)):
        assert torch.equal(a, b)


def test_graphs_that_are_dropped_or_fail():
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights()
    out = chain(x, w, OFFLOAD)
    del out
    gc.collect()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no gradient")

    out = ops.conv2d(Fails.apply(chain(x, w, OFFLOAD)), w[0], None, [1, 1], [1, 1], recompute=OFFLOAD)
    with pytest.raises(RuntimeError, match="no gradient"):
        out.sum().backward()
    for a, b in zip(gradients(OFFLOAD, x, w), gradients(KEEP, x, w)):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_from_several_threads(one_thread):
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights()
    want = gradients(KEEP, x, w)
    found = [None] * 4

    def work(i):
        found[i] = [gradients(OFFLOAD, x, w) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(found))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for run in (r for f in found for r in f):
        for a, b in zip(run, want):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_second_derivatives():
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights(2)
    found = []
    for way in (0, OFFLOAD):
        (g,) = torch.autograd.grad(chain(x, w, way).square().sum(), w[1:], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), w))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_saved_tensor_hooks_come_first(one_thread):
    """Whoever counts or replaces what is saved sees the tensors themselves."""
    x, w = torch.randn(2, 8, 13, 11, dtype=torch.float64), weights()
    with torch.autograd.graph.save_on_cpu():
        out = chain(x, w, OFFLOAD)
    assert ops._link_events() == []
    for a, b in zip(torch.autograd.grad(out.square().sum(), w), gradients(KEEP, x, w)[2:]):
        assert torch.equal(a, b)


def test_a_slow_link_is_waited_for():
    """Copies take their time on the clock: four of 29 KiB at 1 MB a second each way, where none is hidden by what runs."""
    x, w = torch.randn(2, 8, 15, 15, dtype=torch.float64), weights(6)
    chain(x, w, OFFLOAD).sum().backward()
    ops._simulate_link(1e6)
    start = time.monotonic()
    chain(x, w, OFFLOAD).sum().backward()
    assert time.monotonic() - start >= 4 * x.nbytes / 1e6


def test_the_speed_is_checked():
    with pytest.raises(RuntimeError, match="bytes a second"):
        ops._simulate_link(-1)
