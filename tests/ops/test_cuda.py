"""The ops on a CUDA device against aten's there. TSMEM_TEST_DEVICE=cpu runs what needs no CUDA on the CPU: to try the tests themselves."""

import itertools
import os
import pathlib
from typing import List

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, channels_last, hardsigmoid, saved
from test_norm import ACTS, ONE_BIT

DEVICE = os.environ.get("TSMEM_TEST_DEVICE", "cuda")
CUDA = DEVICE.startswith("cuda")
pytestmark = [
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("ops"),
]
only_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
SHAPES = [(4, 16, 7, 7), (3, 5, 6, 5), (2, 33, 11, 13), (70, 8), (2, 1, 37, 41), (2, 13, 31), (3, 24, 1, 1), (2, 1000, 3, 3), (1, 4, 3, 10, 2),
          (8, 64, 56, 56)]  # fmt: skip
ALL, RELU = list(ACTS), "relu"


@pytest.fixture(autouse=True)
def exact_arithmetic():
    """The same algorithms in each call, and float32 that is float32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, False, True, False
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def draw(shape, dtype, last=False, seed=0, scale=2.0, shift=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + shift
    x = x.to(dtype).to(DEVICE)
    return channels_last(x) if last else x


def run(f, inputs, needs=None, cotangent=None):
    """[output, gradients] of f on fresh leaves; `needs`: which floating inputs require one."""
    leaves = []
    for i, t in enumerate(inputs):
        need = isinstance(t, torch.Tensor) and t.is_floating_point() and (needs is None or needs[i])
        leaves.append(t.detach().clone(memory_format=torch.preserve_format).requires_grad_(need) if isinstance(t, torch.Tensor) else t)
    out = f(*leaves)
    wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if not wanted:
        return [out]
    if cotangent is None:
        cotangent = draw(out.shape, torch.float64, seed=7, shift=0.0)
    return [out.detach(), *torch.autograd.grad(out, wanted, cotangent.to(out.dtype))]


def as_good(f, pytorch, inputs, needs=None):
    """In float64 equal; else each result's error against float64 is at most twice PyTorch's and two units in the last place of its norm."""
    ours, theirs = run(f, inputs, needs), run(pytorch, inputs, needs)
    exact = run(pytorch, [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs], needs)
    assert ours[0].stride() == theirs[0].stride()
    for i, (a, b, c) in enumerate(zip(ours, theirs, exact)):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        if a.dtype == torch.float64:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)
            continue
        error, bound = (a.double() - c).norm().item(), (b.double() - c).norm().item()
        assert error <= 2 * bound + 2 * torch.finfo(a.dtype).eps * c.norm().item(), (i, error, bound)


def norm(act, training=True, add=False, pool=None, fused=True):
    """f(x, weight, bias, mean, var, other): the op, or PyTorch's ops that it stands for."""
    arguments, pytorch_act = ACTS[act]

    def f(x, w, b, m, v, z):
        bn = (x, w, b, m.clone(), v.clone(), training, 0.1, 1e-5, True)
        if fused and pool:
            return torch.ops.tsmem.batch_norm_act_max_pool2d(*bn, act, arguments, *pool)
        if fused:
            return torch.ops.tsmem.batch_norm_add_act(*bn, z, act, arguments) if add else torch.ops.tsmem.batch_norm_act(*bn, act, arguments)
        y = torch.batch_norm(*bn)
        y = pytorch_act(y + z if add else y)
        return torch.max_pool2d(y, *pool) if pool else y

    return f


def norm_inputs(shape, dtype, last=False, parameters=None):
    c, p = shape[1], parameters or dtype
    return [draw(shape, dtype, last), draw((c,), p, seed=1), draw((c,), p, seed=2), draw((c,), p, seed=3), draw((c,), p, seed=4).abs() + 0.5,
            draw(shape, dtype, last, seed=5)]  # fmt: skip


def check_norm(shape, dtype, act, training, add, last, needs=(True, True, True, True), parameters=None):
    x, w, b, z = needs
    inputs = norm_inputs(shape, dtype, last, parameters)
    as_good(norm(act, training, add), norm(act, training, add, fused=False), inputs, (x, w, b, False, False, z and add))


@only_cuda
def test_the_library_is_loaded():
    x = draw((2, 8, 4, 4), torch.float32).requires_grad_()
    norm(RELU)(x, None, None, torch.zeros(8, device=DEVICE), torch.ones(8, device=DEVICE), None)
    names = pathlib.Path("/proc/self/maps").read_text()
    assert "libtsmem_ops_cuda.so" in names
    assert torch._C._dispatch_has_kernel_for_dispatch_key("tsmem::_batch_norm_act_forward", "CUDA")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_shapes(shape, dtype):
    for last, training, add in itertools.product((False, True), (True, False), (False, True)):
        check_norm(shape, dtype, RELU, training, add, last)


@pytest.mark.parametrize("act", ALL)
def test_norm_activations(act):
    for dtype, last, training, add in itertools.product((torch.float64, torch.float32, torch.bfloat16), *[(False, True)] * 3):
        check_norm((4, 16, 9, 7), dtype, act, training, add, last)


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_norm_gradients_asked_for(act):
    for needs, training, last in itertools.product(itertools.product((False, True), repeat=4), (True, False), (False, True)):
        check_norm((3, 8, 5, 6), torch.float64, act, training, True, last, needs)
        check_norm((3, 8, 5, 6), torch.float32, act, training, False, last, needs)


def test_norm_with_float32_parameters():
    for dtype, last in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        inputs = norm_inputs((4, 16, 9, 7), dtype, last, torch.float32)
        ours, theirs = (run(norm(RELU, fused=fused), inputs, (True, True, True, False, False, False)) for fused in (True, False))
        for a, b in zip(ours, theirs):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_running_statistics():
    for dtype, last in itertools.product((torch.float64, torch.float32), (False, True)):
        x = draw((8, 16, 19, 17), dtype, last)
        stats = [[torch.zeros(16, dtype=dtype, device=DEVICE), torch.ones(16, dtype=dtype, device=DEVICE)] for _ in range(2)]
        for _ in range(4):
            torch.ops.tsmem.batch_norm_act(x, None, None, *stats[0], True, 0.1, 1e-5, True, "identity", [])
            torch.batch_norm(x, None, None, *stats[1], True, 0.1, 1e-5, True)
        for a, b in zip(*stats):
            torch.testing.assert_close(a, b, rtol=1e-9 if dtype == torch.float64 else 1e-5, atol=1e-6)


def test_statistics_of_large_means():
    for last in (False, True):
        x = draw((16, 8, 40, 40), torch.float32, last, shift=1e4)
        mean, var = torch.zeros(8, device=DEVICE), torch.ones(8, device=DEVICE)
        torch.ops.tsmem.batch_norm_act(x, None, None, mean, var, True, 1.0, 1e-5, True, "identity", [])
        exact = torch.var_mean(x.double(), (0, 2, 3), correction=1)
        torch.testing.assert_close(var.double(), exact[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(mean.double(), exact[1], rtol=1e-7, atol=0)


def test_unaligned_and_strided():
    for dtype in (torch.float32, torch.bfloat16):
        base = draw((2, 8, 10, 12, 3), dtype)
        flat = draw((2 * 8 * 5 * 7 + 1,), dtype)
        for view in (base[..., 1], base[:, ::2, 1:, 1:, 0], base[..., 0].transpose(2, 3), flat[1:].view(2, 8, 5, 7), base[:1, ..., 0].expand(3, -1, -1, -1)):
            w, b, m, v = norm_inputs((2, view.shape[1]), dtype)[1:5]
            found = []
            for fused in (True, False):
                x = view.detach().requires_grad_()
                y = norm("silu", fused=fused)(x, w, b, m, v, None)
                found.append([y.detach(), torch.autograd.grad(y, x, draw(y.shape, dtype, seed=7, shift=0.0))[0]])
            slack = 1e-4 if dtype == torch.float32 else 6e-2
            torch.testing.assert_close(*found, rtol=slack, atol=slack)


@pytest.mark.parametrize("act", ["relu", "silu", "identity"])
def test_norm_gradcheck(act):
    for last, training in itertools.product((False, True), (True, False)):
        inputs = [t.detach() for t in norm_inputs((3, 8, 3, 3), torch.float64, last)]
        for t in inputs[:3] + inputs[5:]:
            t.requires_grad_()
        f = norm(act, training, add=True)
        assert torch.autograd.gradcheck(lambda x, w, b, z: f(x, w, b, inputs[3], inputs[4], z), (*inputs[:3], inputs[5]), fast_mode=True)  # noqa: B023


POOLS = [([3, 3], [2, 2], [1, 1], [1, 1], False), ([2, 2], [], [0, 0], [1, 1], True), ([3, 2], [1, 2], [1, 0], [2, 1], False),
         ([17, 17], [3, 3], [8, 8], [1, 1], False)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_pool(dtype):
    for pool, channels, last, training in itertools.product(POOLS, (3, 16), (False, True), (True, False)):
        inputs = norm_inputs((2, channels, 20, 18), dtype, last)
        needs = (True, True, True, False, False, False)
        if dtype == torch.float64:
            as_good(norm(RELU, training, pool=pool), norm(RELU, training, pool=pool, fused=False), inputs, needs)
        else:  # near equals round alike or not: another of them is the greater
            ours, theirs = (run(norm(RELU, training, pool=pool, fused=fused), inputs, needs) for fused in (True, False))
            for a, b in zip(ours, theirs):
                assert (a.double() - b.double()).norm() <= 0.1 * b.double().norm() + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_pool(dtype):
    for (kernel, stride, padding, dilation, ceil), channels, last in itertools.product(POOLS, (3, 16), (False, True)):
        x = draw((2, channels, 20, 18), dtype, last).round()
        x[0, 0, 2, 2] = float("nan")
        ours, theirs = (run(lambda x, f=f: f(x, kernel, stride, padding, dilation, ceil), [x]) for f in (torch.ops.tsmem.max_pool2d, torch.max_pool2d))  # noqa: B023
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours[1], theirs[1], rtol=8 * eps, atol=64 * eps, equal_nan=True)
    for d, size in ((1, (31,)), (3, (5, 6, 7))):
        x = draw((2, 8, *size), dtype)
        for name, arguments in ((f"max_pool{d}d", ([2] * d,)), (f"adaptive_max_pool{d}d", ([3] * d,))):
            ours = run(lambda x, n=name, a=arguments: getattr(torch.ops.tsmem, n)(x, *a), [x])
            theirs = run(lambda x, n=name, a=arguments: getattr(F, n)(x, *a), [x])
            # PyTorch adds the gradients of overlapping windows in the tensor's dtype.
            torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("name", ONE_BIT)
def test_masks(name):
    pytorch = hardsigmoid if name == "hardsigmoid" else ACTS[name][1]
    for dtype, shape, last in itertools.product(DTYPES, ((4, 16, 7, 7), (3, 5, 6, 5), (1, 1, 1, 1), (2, 3, 300, 7)), (False, True)):
        x = draw(shape, dtype, last)
        ours, theirs = run(lambda x: torch.ops.tsmem.act(x, name, ACTS[name][0]), [x]), run(pytorch, [x])
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    kept, _ = saved(lambda: torch.ops.tsmem.act(draw((1000, 80), torch.float32).requires_grad_(), name, ACTS[name][0]))
    assert [t.numel() for t in kept] == [10_000]


def test_scale():
    for last, dtype in itertools.product((False, True), (torch.float64, torch.float32)):
        x, s = draw((3, 16, 5, 7), dtype, last), draw((3, 16, 1, 1), dtype)
        as_good(lambda x, s: torch.ops.tsmem.mul_act(F.silu(x), s, x, "silu", []), lambda x, s: F.silu(x) * s, [x, s])


def test_layer_and_group_norm():
    for dtype in DTYPES:
        x, w, b = draw((6, 8, 4, 16), dtype), draw((16,), dtype), draw((16,), dtype)
        as_good(lambda x, w, b: torch.ops.tsmem.layer_norm(x, [16], w, b), lambda x, w, b: F.layer_norm(x, [16], w, b), [x, w, b])
        for last in (False, True):
            x, w, b = draw((6, 8, 4, 16), dtype, last), draw((8,), dtype), draw((8,), dtype)
            as_good(lambda x, w, b: torch.ops.tsmem.group_norm(x, 4, w, b), lambda x, w, b: F.group_norm(x, 4, w, b), [x, w, b])
            for name, act in (("relu", F.relu), ("silu", F.silu)):
                as_good(lambda x, w, b: torch.ops.tsmem.group_norm_act(x, 4, w, b, 1e-5, True, name, []), lambda x, w, b: act(F.group_norm(x, 4, w, b)), [x, w, b])  # noqa: B023


def test_conv():
    for dtype, last, (x_needs, w_needs) in itertools.product((torch.float64, torch.float32), (False, True), ((True, True), (True, False), (False, True))):
        x, w, b = draw((2, 8, 9, 9), dtype, last), draw((16, 8, 3, 3), dtype), draw((16,), dtype)
        as_good(lambda x, w, b: torch.ops.tsmem.conv2d(x, w, b, [2, 2], [1, 1]), lambda x, w, b: F.conv2d(x, w, b, 2, 1), [x, w, b], (x_needs, w_needs, True))


@pytest.mark.parametrize("name", ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
def test_dropout_draws_pytorchs_mask(name):
    for dtype, shape, last in itertools.product(DTYPES, ((64, 40, 7, 7), (3, 5, 6, 5), (5, 8)), (False, True)):
        x = draw(shape, dtype, last)
        results = []
        for op in (getattr(torch.ops.tsmem, name), getattr(torch.ops.aten, name)):
            torch.manual_seed(3)
            torch.rand(5, device=DEVICE)
            results.append([*run(lambda x: op(x, 0.3, True), [x]), torch.rand(3, device=DEVICE)])  # noqa: B023
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=0)
            assert torch.equal(a == 0, b == 0)


@only_cuda
def test_dropout_leaves_rnns_their_state():
    """cuDNN's RNNs draw their dropout's state once, and again after a generator's state was set."""
    torch.manual_seed(0)
    rnn = torch.nn.LSTM(8, 8, 2, dropout=0.5).to(DEVICE)
    x, found = draw((5, 4, 8), torch.float32), []
    for op in (torch.ops.tsmem.dropout, torch.ops.aten.dropout):
        torch.manual_seed(3)
        results = []
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            results += [rnn(op(leaf, 0.5, True))[0].detach(), torch.rand(3, device=DEVICE)]
        found.append(results)
    for a, b in zip(*found):
        assert torch.equal(a, b)


@only_cuda
def test_gradient_of_an_input_that_is_not_kept():
    """Backward of a frozen convolution holds the two gradients and no map for the input's shape."""
    w = draw((64, 64, 3, 3), torch.float32).requires_grad_(False)
    x = draw((16, 64, 64, 64), torch.float32).requires_grad_()
    torch.backends.cudnn.deterministic = False
    for f in (torch.ops.tsmem.conv2d, F.conv2d):
        torch.autograd.grad(f(x, w, None, [1, 1], [1, 1]).sum(), x)  # workspaces
    peaks, grads = [], []
    for f in (torch.ops.tsmem.conv2d, F.conv2d):
        y = f(x, w, None, [1, 1], [1, 1])
        cotangent = torch.ones_like(y)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads.append(torch.autograd.grad(y, x, cotangent)[0])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del y
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)
    assert peaks[0] <= peaks[1] + (1 << 20), peaks


@only_cuda
def test_input_gradients_by_transposed_convolutions():
    for op, pytorch, size, weight, settings in (
        ("conv2d", F.conv2d, (2, 8, 9, 12), (16, 8, 3, 2), ([2, 3], [1, 0], [1, 2], 1)),
        ("conv2d", F.conv2d, (2, 8, 9, 12), (16, 4, 3, 3), ([2, 2], [1, 1], [1, 1], 2)),
        ("conv2d", F.conv2d, (2, 8, 9, 12), (8, 1, 3, 3), ([2, 2], [1, 1], [1, 1], 8)),
        ("conv1d", F.conv1d, (2, 8, 31), (16, 8, 5), ([3], [2], [1], 1)),
        ("conv3d", F.conv3d, (2, 4, 5, 6, 7), (8, 4, 2, 3, 2), ([2, 1, 2], [1, 0, 1], [1, 1, 1], 1)),
        ("conv_transpose2d", F.conv_transpose2d, (2, 8, 5, 6), (8, 4, 3, 3), ([2, 3], [1, 0], [1, 2], 1, [1, 1])),
    ):
        for last in (False, True):
            x, w = draw(size, torch.float64, last), draw(weight, torch.float64, seed=1)
            stride, padding, dilation, groups, *rest = settings
            arguments = (stride, padding, *rest, groups, dilation) if rest else (stride, padding, dilation, groups)
            as_good(lambda x, w: getattr(torch.ops.tsmem, op)(x, w, None, *arguments), lambda x, w: pytorch(x, w, None, *arguments), [x, w], (True, False))  # noqa: B023


@only_cuda
def test_dropout_keeps_no_mask():
    kept, _ = saved(lambda: torch.ops.tsmem.dropout(torch.ones(1000, 1000, device=DEVICE, requires_grad=True), 0.5, True))
    assert sum(t.numel() for t in kept) == 2
    x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    y = torch.ops.tsmem.dropout(x, 0.5, True)
    state = torch.cuda.get_rng_state()
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.cuda.get_rng_state(), state) and torch.equal(first, torch.autograd.grad(y.sum(), x)[0]) and torch.equal(first, y.detach())


def test_runs_are_equal():
    """Bit for bit: no atomics."""
    for dtype, last in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        inputs = norm_inputs((16, 64, 28, 28), dtype, last)
        first, *others = [run(norm(RELU, add=True), inputs, (True, True, True, False, False, True)) for _ in range(4)]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0, 4)], ids=str)
def test_empty(shape):
    x = torch.empty(shape, device=DEVICE, requires_grad=True)
    for f in (lambda x: torch.ops.tsmem.act(x, RELU, []), lambda x: torch.ops.tsmem.dropout(x, 0.5, True)):
        (f(x).sum()).backward()
        assert x.grad.shape == x.shape


def network(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, train: bool):
    y = torch.ops.tsmem.conv2d(x, w, None, [1, 1], [1, 1], [1, 1], 1, 1)
    y = torch.ops.tsmem.batch_norm_act(y, None, None, None, None, True, 0.1, 1e-5, True, "silu", torch.jit.annotate(List[float], []), 1)
    y = torch.ops.tsmem.conv2d(y, v, None, [1, 1], [0, 0], [1, 1], 1, 1)
    return torch.ops.tsmem.dropout(y, 0.25, train, False, 1)


def test_repeated_calls():
    """TorchScript changes the graph between the first calls."""
    inputs = [draw((2, 3, 8, 8), torch.float64), draw((16, 3, 3, 3), torch.float64, seed=1), draw((8, 16, 3, 3), torch.float64, seed=2), True]

    def pytorch(x, w, v, train):
        y = F.silu(torch.batch_norm(F.conv2d(x, w, None, 1, 1), None, None, None, None, True, 0.1, 1e-5, True))
        return F.dropout(F.conv2d(y, v), 0.25, train)

    scripted = torch.jit.script(network)
    for _ in range(4):
        found = []
        for f in (scripted, pytorch):
            torch.manual_seed(1)
            found.append(run(f, inputs))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Dropout(0.5)

    @torch.jit.export
    def body(self, x):
        return self.drop(torch.relu(self.bn(self.conv(x))))

    def forward(self, x):
        return self.body(x)


def checkpoint_pair():
    """A scripted module, and a copy whose method `around` is its `body` through tsmem::checkpoint."""
    torch.manual_seed(0)
    pytorch, ours = torch.jit.script(Block().to(DEVICE)), torch.jit.script(Block().to(DEVICE))
    ours.load_state_dict(pytorch.state_dict())
    if not hasattr(ours, "around"):  # copies share a class
        ours.define("def around(self, x: Tensor):\n    y = torch.ops.tsmem.checkpoint(self, 'body', (x,))\n    assert isinstance(y, Tensor)\n    return y\n")
    return pytorch, ours


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
def test_checkpoint(amp):
    pytorch, ours = checkpoint_pair()
    x = draw((4, 8, 9, 9), torch.float32)
    found = []
    for m, f in ((pytorch, pytorch.forward), (ours, ours.around)):
        torch.manual_seed(2)
        with torch.autocast(DEVICE.split(":")[0], torch.bfloat16, enabled=amp):
            out = run(f, [x])
        leaf = x.clone().requires_grad_()
        torch.manual_seed(2)
        with torch.autocast(DEVICE.split(":")[0], torch.bfloat16, enabled=amp):
            y = f(leaf)
        y.float().square().sum().backward()
        found.append([*out, *(p.grad for p in m.parameters()), *m.buffers(), torch.rand(3, device=DEVICE)])
    slack = 5e-2 if amp else 1e-4
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=slack, atol=slack * max(1.0, b.abs().max().item()))


def test_autocast():
    x, w = draw((2, 8, 9, 9), torch.float32), draw((16, 8, 3, 3), torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE.split(":")[0], dtype):
            ours, theirs = run(lambda x, w: torch.ops.tsmem.conv2d(x, w), [x, w]), run(F.conv2d, [x, w])
            norms = [run(lambda x, o=o: o(x.to(dtype), [9, 9]), [x]) for o in (torch.ops.tsmem.layer_norm, F.layer_norm)]  # noqa: B023
        for a, b in itertools.chain(zip(ours, theirs), zip(*norms)):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@only_cuda
def test_streams():
    """Work goes to the current stream, and what another stream made is kept, not recomputed."""
    inputs = norm_inputs((8, 64, 56, 56), torch.float32)
    expected = run(norm(RELU), inputs, (True, True, True, False, False, False))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        found = run(norm(RELU), inputs, (True, True, True, False, False, False))
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    x, w = draw((4, 8, 9, 9), torch.float32).requires_grad_(), draw((8, 8, 3, 3), torch.float32).requires_grad_()
    results = []
    for other in (torch.cuda.current_stream(), stream):
        y = torch.ops.tsmem.conv2d(x, w, None, [1, 1], [1, 1])
        y = torch.ops.tsmem.batch_norm_act(y, None, None, None, None, True, 0.1, 1e-5, True, "relu", [], 1)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            z = torch.ops.tsmem.conv2d(y, w, None, [1, 1], [1, 1])
        torch.cuda.current_stream().wait_stream(other)
        results.append(torch.autograd.grad(z.square().sum(), (x, w)))
    torch.testing.assert_close(*results)


@only_cuda
def test_no_synchronisation():
    inputs = norm_inputs((8, 16, 28, 28), torch.float32)
    pool = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    before = torch.cuda.get_sync_debug_mode()
    cotangents = {}
    fs = [norm(RELU, add=True), norm("silu", pool=pool), lambda x, *_: torch.ops.tsmem.max_pool2d(x, [3, 3], [2, 2]),
          lambda x, *_: torch.ops.tsmem.act(x, RELU, []), lambda x, *_: torch.ops.tsmem.dropout(x, 0.5, True),
          lambda x, *_: torch.ops.tsmem.group_norm(x, 4), lambda x, *_: torch.ops.tsmem.alpha_dropout(x, 0.5, True)]  # fmt: skip
    for i, f in enumerate(fs):
        cotangents[i] = torch.ones_like(f(*inputs))
    try:
        torch.cuda.set_sync_debug_mode("error")
        for i, f in enumerate(fs):
            leaf = inputs[0].detach().requires_grad_()
            torch.autograd.grad(f(leaf, *inputs[1:]), leaf, cotangents[i])
    finally:
        torch.cuda.set_sync_debug_mode(before)


@only_cuda
def test_graph_capture():
    torch.manual_seed(0)
    static = draw((4, 16, 14, 14), torch.float32).requires_grad_()
    w, b = draw((16,), torch.float32, seed=1), draw((16,), torch.float32, seed=2)
    pool = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    mean, var = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)

    def step():
        y = torch.ops.tsmem.batch_norm_act(static, w, b, mean, var, True, 0.0, 1e-5, True, "relu", [], 1)
        y = torch.ops.tsmem.act(y, "leaky_relu", [0.1], 1)
        y = torch.ops.tsmem.batch_norm_act_max_pool2d(y, w, b, mean, var, True, 0.0, 1e-5, True, "silu", [], *pool, 1)
        return torch.autograd.grad(y.square().sum(), static)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for seed in (5, 6):
        with torch.no_grad():
            static.copy_(draw((4, 16, 14, 14), torch.float32, seed=seed))
        graph.replay()
        torch.testing.assert_close(found, step())


@only_cuda
def test_maps_on_chip():
    """One kernel that keeps a map in shared memory ran and gave what the passes give, for maps of one to many blocks; also replayed from a graph."""
    shapes = ((4, 1032, 5, 7), (8, 264, 14, 14), (70, 8), (16, 1024, 14, 14))
    for shape, dtype, act, add in itertools.product(shapes, (torch.float32, torch.bfloat16, torch.float16), (RELU, "silu", "gelu"), (False, True)):
        check_norm(shape, dtype, act, True, add, len(shape) == 4)
    ways = torch.ops.tsmem._ways(torch.zeros(1, device=DEVICE))
    print(*ways, sep="\n")
    assert len(ways) >= 2 * len(shapes) and not [w for w in ways if ": plain, as" in w]

    static = draw((8, 264, 14, 14), torch.bfloat16, last=True).requires_grad_()
    mean, var = torch.zeros(264, device=DEVICE), torch.ones(264, device=DEVICE)

    def step():
        y = torch.ops.tsmem.batch_norm_act(static, None, None, mean, var, True, 0.1, 1e-5, True, "relu", [])
        return y, *torch.autograd.grad(y, static, torch.ones_like(y))

    step()  # tries both ways
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6, 7):
        with torch.no_grad():
            static.copy_(draw(static.shape, torch.bfloat16, last=True, seed=seed))
        before = mean.clone(), var.clone()
        graph.replay()
        replayed = [t.clone() for t in (*captured, mean, var)]
        mean.copy_(before[0]), var.copy_(before[1])
        assert all(torch.equal(a, b) for a, b in zip(replayed, (*step(), mean, var), strict=True))


@only_cuda
@pytest.mark.parametrize("name", ["dropout", "alpha_dropout"])
def test_dropout_under_capture(name):
    """Each replay draws anew, as PyTorch's own does, and backward has forward's noise. Plain dropout keeps no mask there either."""
    static = draw((4, 16, 14, 14), torch.float32).requires_grad_()
    op, pytorch = getattr(torch.ops.tsmem, name), getattr(torch.ops.aten, name)
    for f in (op, pytorch):
        torch.autograd.grad(f(static, 0.5, True).sum(), static)
    found = []
    for f in (op, pytorch):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept, out = saved(lambda: torch.relu(f(static, 0.5, True)) + f(static, 0.3, True))  # noqa: B023
            (grad,) = torch.autograd.grad(out.sum(), static)
        if f is op and name == "dropout":
            assert sum(t.numel() for t in kept if t.dtype in (torch.int64, torch.bool, torch.uint8)) == 4
        torch.manual_seed(3)
        results = []
        for _ in range(3):
            graph.replay()
            results += [out.clone(), grad.clone()]
        results.append(torch.rand(3, device=DEVICE))
        found.append(results)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.equal(found[0][0], found[0][2])


@only_cuda
def test_dropout_in_graphed_callables():
    torch.manual_seed(0)

    class Layers(torch.nn.Module):
        def __init__(self, op):
            super().__init__()
            self.linear, self.op = torch.nn.Linear(64, 64), op

        def forward(self, x):
            return self.op(torch.relu(self.linear(self.op(x, 0.2, True))), 0.5, True)

    found = []
    for op in (torch.ops.tsmem.dropout, torch.ops.aten.dropout):
        torch.manual_seed(1)
        model = Layers(op).to(DEVICE)
        x = draw((32, 64), torch.float32).requires_grad_()
        model = torch.cuda.make_graphed_callables(model, (x,))
        torch.manual_seed(5)
        results = []
        for _ in range(3):
            y = model(x)
            results += [y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y.sum(), [x, *model.parameters()]))]
        found.append(results)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@only_cuda
def test_our_dropout_runs():
    """What the first use tried: else PyTorch's own would keep its mask, unnoticed by the other tests."""
    assert torch.ops.tsmem._draws_as_pytorch(torch.empty(0, device=DEVICE))


@only_cuda
def test_checkpoint_under_capture():
    _, ours = checkpoint_pair()
    x = draw((4, 8, 9, 9), torch.float32).requires_grad_()
    ours.eval()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(ours.around(x).sum(), x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # draws nothing
        (grad,) = torch.autograd.grad(ours.around(x).sum(), x)
    graph.replay()
    torch.testing.assert_close(grad, torch.autograd.grad(ours.around(x).sum(), x)[0])


@only_cuda
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs = norm_inputs((4, 16, 9, 7), torch.float32)
    first = run(norm(RELU, add=True), inputs, (True, True, True, False, False, True))
    cotangent = draw(first[0].shape, torch.float64, seed=7, shift=0.0).to("cuda:1")
    second = run(norm(RELU, add=True), [t.to("cuda:1") for t in inputs], (True, True, True, False, False, True), cotangent)
    for a, b in zip(first, second):  # the current device stays cuda:0
        assert b.device.index == 1
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-6, atol=1e-6)


@only_cuda
def test_more_than_two_to_the_31_elements():
    shape = (33, 64, 1024, 1024)
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of device memory")
    for last in (False, True):
        x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE, memory_format=torch.channels_last if last else torch.contiguous_format)
        x.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        x.requires_grad_()
        y = torch.ops.tsmem.batch_norm_act(x, None, None, None, None, True, 0.1, 1e-5, True, "relu", [])
        probe = x.detach()[-1, -1, -8:]
        mean = x.detach()[:, -1].float().mean()
        std = x.detach()[:, -1].float().std()
        torch.testing.assert_close(y.detach()[-1, -1, -8:].float(), ((probe.float() - mean) / std).relu(), rtol=2e-2, atol=2e-2)
        del y
        z = torch.ops.tsmem.max_pool2d(x, [2, 2])
        (grad,) = torch.autograd.grad(z, x, torch.ones_like(z))
        assert grad[-1].float().sum() == z[-1].numel()
        del x, z, grad
        torch.cuda.empty_cache()


# --- Outputs that wait in the host's memory


@pytest.fixture
def link():
    """The CPU needs a simulated one."""
    torch.ops.tsmem._simulate_link(0 if CUDA else 1e15)
    yield
    torch.ops.tsmem._simulate_link(0)


def convolutions(x, weights, recompute):
    for w in weights:
        x = torch.ops.tsmem.conv2d(x, w, None, [1, 1], [1, 1], recompute=recompute)
    return x


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", (False, True))
def test_offloaded_outputs_come_back_as_they_were(dtype, last):
    """Several passes, so that memory and streams are used again."""
    x, weights = draw((8, 16, 56, 56), dtype, last), [(draw((16, 16, 3, 3), dtype, seed=i, shift=0.0) / 32).requires_grad_() for i in range(8)]
    want = torch.autograd.grad(convolutions(x, weights, -1).float().square().mean(), weights)
    for _ in range(5):
        for a, b in zip(torch.autograd.grad(convolutions(x, weights, 4).float().square().mean(), weights), want):
            assert torch.equal(a, b)


@only_cuda
def test_offloaded_outputs_leave_the_device():
    x, weights = draw((8, 16, 112, 112), torch.float32), [(draw((16, 16, 3, 3), torch.float32, seed=i) / 16).requires_grad_() for i in range(12)]

    def kept(recompute):
        out = convolutions(x, weights, recompute)
        bytes_kept = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out.sum().backward()
        return bytes_kept, torch.cuda.max_memory_allocated()

    kept(-1)
    before = torch.cuda.memory_allocated()
    (all_kept, all_peak), (some_kept, some_peak) = kept(-1), kept(4)
    assert some_kept - before <= 4 * x.nbytes < 11 * x.nbytes <= all_kept - before
    assert some_peak < all_peak - 4 * x.nbytes


@only_cuda
def test_offloaded_outputs_on_another_stream():
    x, weights = draw((8, 16, 56, 56), torch.float32), [(draw((16, 16, 3, 3), torch.float32, seed=i) / 16).requires_grad_() for i in range(8)]
    want = torch.autograd.grad(convolutions(x, weights, -1).square().sum(), weights)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(stream):
            found = torch.autograd.grad(convolutions(x, weights, 4).square().sum(), weights)
            busy = torch.randn(64, 1024, 1024, device=DEVICE).sin_()  # noqa: F841  takes what was freed
        torch.cuda.current_stream().wait_stream(stream)
        for a, b in zip(found, want):
            assert torch.equal(a, b)


@only_cuda
def test_nothing_is_offloaded_while_a_graph_is_captured():
    x, weights = draw((4, 16, 28, 28), torch.float32), [(draw((16, 16, 3, 3), torch.float32, seed=i) / 16).requires_grad_() for i in range(3)]
    want = torch.autograd.grad(convolutions(x, weights, -1).square().sum(), weights)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(convolutions(x, weights, 4).square().sum(), weights)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(convolutions(x, weights, 4).square().sum(), weights)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("again", [0, 1])
def test_convolutions_of_a_norm(again, monkeypatch):
    """cuDNN's fused graphs in float16: gradients as near to float64's as without them."""
    if CUDA:
        torch.backends.cudnn.deterministic = False
    sizes = [(64, 64, 3, 3), (128, 64, 1, 1), (64, 128, 3, 3)]
    weights = [draw(s, torch.float64, last=True, seed=i, scale=(s[1] * s[2] * s[3]) ** -0.5, shift=0.0) for i, s in enumerate(sizes)]
    scales = [draw((c,), torch.float64, seed=c + k, scale=0.2, shift=1.0 - k) for c in (64, 128) for k in (0, 1)]
    x = draw((16, 64, 28, 28), torch.float64, last=True, shift=0.0)

    def step(dtype):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (x, *weights, *scales)]
        y = leaves[0]
        for i, w in enumerate(leaves[1:4]):
            side = w.size(2) // 2
            y = torch.ops.tsmem.conv2d(y, w, None, [1, 1], [side, side], [1, 1], 1, again if i == 1 else 0)
            if i < 2:
                y = torch.ops.tsmem.batch_norm_act(y, *leaves[4 + 2 * i : 6 + 2 * i], None, None, True, 0.1, 1e-5, True, "relu", [], 1)
        return torch.autograd.grad((y * draw(y.shape, torch.float64, last=True, seed=9, shift=0.0).to(dtype)).sum(), leaves)

    exact = step(torch.float64)
    monkeypatch.setenv("TSMEM_CUDNN", "0")
    plain = step(torch.float16)
    monkeypatch.setenv("TSMEM_CUDNN", "1")
    for _ in range(2):
        for ours, theirs, true in zip(step(torch.float16), plain, exact, strict=True):
            assert ours.stride() == theirs.stride()
            size, error, usual = true.norm(), (ours.double() - true).norm(), (theirs.double() - true).norm()
            assert error <= 2 * usual + 2**-10 * size, (error / size, usual / size)
    if CUDA and torch.cuda.get_device_capability() >= (8, 0):
        ways = [w for w in torch.ops.tsmem._ways(torch.zeros(1, device=DEVICE)) if "of relu(batch_norm)" in w and "[16, 64, 28, 28]" in w]
        print(*ways, sep="\n")
        assert ways and not [w for w in ways if ": plain, as" in w]
