"""Memory that runs out: a step of every op and of small rewritten models, in which the n-th request for memory is refused, for every n.

Each time: an ordinary exception, nothing leaked, nothing left changed that PyTorch would not have changed, and the next step gives the very same bits.
"""

import contextlib
import ctypes
import gc
import tempfile

import command_line
import conftest
import pytest
import small
import torch
import tsmem
from test_recompute import network, parameters
from torch import Tensor, nn

ops = torch.ops.tsmem
FOREVER = 2**62
MANY = 60  # requests, of more than one operator as a rule
BN = (True, 0.1, 1e-5, True)


@pytest.fixture(scope="module")
def faults():
    """The allocator of tests/faults, in place of PyTorch's for these tests."""
    path = conftest.library().with_name("libtsmem_failing_allocator.so")
    assert path.exists(), f"{path} is not built: build with TSMEM_TESTS=ON"
    library = ctypes.CDLL(str(path))
    library.faults_refuse.argtypes = [ctypes.c_int64, ctypes.c_int64]
    for name in ("requests", "refused", "live_bytes"):
        getattr(library, f"faults_{name}").restype = ctypes.c_int64
    library.faults_install()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield library
    library.faults_refuse(0, 0)
    library.faults_uninstall()
    torch.set_num_threads(threads)


def thread_state():
    """What a call must leave as it was, beside memory."""
    devices = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    keys = [torch._C._dispatch_tls_is_dispatch_key_excluded(k) for k in ("AutogradCPU", "ADInplaceOrView", "AutocastCPU")]
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), devices, keys, torch._C._current_graph_task_id()


def same(a, b):
    return len(a) == len(b) and all((x is None) == (y is None) and (x is None or (x.dtype == y.dtype and torch.equal(x, y))) for x, y in zip(a, b))


def close(a, b):
    """But for the rounding of another way to compute it, relative to the largest number."""
    for x, y in zip(a, b):
        if x is not None and (x - y).abs().max() > (0.02 if x.dtype == torch.bfloat16 else 1e-5) * y.abs().max():
            return False
    return len(a) == len(b)


def floating(value):
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for item in value for t in floating(item)] if isinstance(value, (list, tuple)) else []


class Step:
    """f(*inputs) and its gradients by `leaves`. `buffers`: tensors that f changes, put back before every step; pairs of them go together."""

    def __init__(self, f, inputs, leaves, buffers=(), context=contextlib.nullcontext):
        self.f, self.inputs, self.leaves, self.context = f, inputs, leaves, context
        self.buffers = list(buffers)
        self.before = [b.clone() for b in self.buffers]
        outputs = self.forward()
        self.cotangents = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.dtype) for t in outputs]
        self.after = [b.clone() for b in self.buffers]
        self.generator = torch.get_rng_state()

    def forward(self):
        with torch.no_grad():
            for b, before in zip(self.buffers, self.before):
                b.copy_(before)
        torch.manual_seed(0)
        with self.context():
            return [t for t in floating(self.f(*self.inputs)) if t.requires_grad]

    def backward(self, outputs, **options):
        return list(torch.autograd.grad(outputs, self.leaves, self.cotangents, allow_unused=True, **options))

    def run(self):
        outputs = self.forward()
        return [*(t.detach() for t in outputs), *self.backward(outputs), *(b.clone() for b in self.buffers)]

    def twice(self):
        """The gradients, and those of a number made of them; a refusal by name where an op has no second derivatives."""
        first = [g for g in self.backward(self.forward(), create_graph=True) if g is not None]
        wanted = [g for g in first if g.requires_grad]
        second = torch.autograd.grad(wanted, self.leaves, [torch.ones_like(g) for g in wanted], allow_unused=True) if wanted else ()
        return [*(g.detach() for g in first), *second]

    def check_buffers(self):
        """Statistics of a norm change together or not at all; buffers come in the order of (mean, variance)."""
        changed = [not torch.equal(b, before) for b, before in zip(self.buffers, self.before)]
        for b, before, after in zip(self.buffers, self.before, self.after):
            assert torch.equal(b, before) or torch.equal(b, after), "a buffer is half changed"
        statistics = [c for b, c in zip(self.buffers, changed) if b.is_floating_point()]
        assert statistics[0::2] == statistics[1::2], "one of two statistics has changed"


def forget_failed_pass():
    """What was ready to run when a pass failed stays in the queue of this thread, in PyTorch as well, until its next pass."""
    torch.ones((), requires_grad=True).square().backward()


def refuse_each(faults, f, expected, check=lambda n: None):
    """Refuses each request for memory of f() in turn: alone, and with all that follow; of many, the one and the other in turns. Then f() again must give what is expected.

    An exception each time; but PyTorch's convolutions and half-size products have another way without oneDNN's memory, with the right result.
    """
    assert same(f(), expected)
    faults.faults_refuse(0, 0)
    f()
    count = faults.faults_requests()
    state, live = thread_state(), faults.faults_live_bytes()
    assert count > 0
    raised = 0
    for n in range(1, count + 1):
        for last in (n, FOREVER) if count <= MANY else ((n, FOREVER)[n % 2],):
            faults.faults_refuse(n, last)
            failed, result = "", None
            try:
                result = f()
            except RuntimeError as error:
                failed = str(error)
            refused = faults.faults_refused()
            faults.faults_refuse(0, 0)
            torch._C._set_mkldnn_enabled(True)  # PyTorch's matmul turns it off for the process where it fails
            assert refused >= 1
            if result is None:
                assert "failing allocator" in failed, failed
                raised += 1
                forget_failed_pass()
            else:
                assert close(result, expected), f"request {n} of {count} was refused without an error, and the result is wrong"
                del result
            assert faults.faults_live_bytes() == live, f"request {n} of {count} leaked"
            assert thread_state() == state
            check(n)
        assert same(f(), expected), f"another result after request {n} of {count} was refused"
        assert faults.faults_live_bytes() == live
    assert raised > 0


def exhaust(faults, step, twice=True):
    for _ in range(4):  # TorchScript's executor profiles and compiles first
        expected = step.run()
    gc.collect()
    refuse_each(faults, step.run, expected, lambda n: step.check_buffers())
    # Backward alone: the graph stays, holds no more than before, and gives the same again. No number is drawn.
    del expected
    outputs = step.forward()
    again = lambda: step.backward(outputs, retain_graph=True)  # noqa: E731
    before = faults.faults_live_bytes()
    expected = again()
    generator, buffers = torch.get_rng_state(), [b.clone() for b in step.buffers]
    held = sum(g.untyped_storage().nbytes() for g in {g.untyped_storage().data_ptr(): g for g in expected if g is not None}.values())
    own = sum(t.nbytes for t in [generator, *buffers])
    assert faults.faults_live_bytes() == before + held + own, "a pass with retain_graph leaves something behind"

    def unchanged(n):
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(a, b) for a, b in zip(step.buffers, buffers))

    refuse_each(faults, again, expected, unchanged)
    del outputs, again, expected
    if not twice:
        return
    try:
        expected = step.twice()
    except RuntimeError as error:  # by our name, or as PyTorch where an op left its gradient to PyTorch's
        assert "second derivatives are not supported" in str(error) or "is not implemented" in str(error)
        return
    refuse_each(faults, step.twice, expected)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


def pick(outputs):
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


MAP, CHANNELS = (2, 8, 16, 12), (8,)
NORM = (MAP, CHANNELS, CHANNELS)


def scaled(x, scale):
    y = ops.act(x, "silu", [], 1)
    return ops.mul_act(y, scale, x, "silu", [], 1)


def scaled_norm(x, w, b, scale, m, v):
    y, mean, invstd = ops.batch_norm_act_stats(x, w, b, m, v, *BN, "silu", [], 1)
    return ops.mul_batch_norm_act(y, scale, x, w, b, mean, invstd, "silu", [], 1)


# By name: what is differentiated by, and the op; with the running statistics after them where there are two arguments more.
OPS = {
    "act-bits": ([MAP], lambda x: ops.act(x, "hardtanh", [-1.0, 1.0], 1)),
    "act-smooth": ([MAP], lambda x: ops.act(x, "gelu", [], 1)),
    "add": ([MAP, MAP], lambda x, y: ops.add(x, y, 2, 1)),
    "mul": ([MAP, (2, 8, 1, 1)], lambda x, y: ops.mul(x, y, 1)),
    "cat": ([MAP, MAP], lambda x, y: ops.cat([x, y], 1, 1)),
    "mul_act": ([MAP, (2, 8, 1, 1)], scaled),
    "mul_batch_norm_act": ([*NORM, (2, 8, 1, 1)], scaled_norm),
    "batch_norm_act": (NORM, lambda x, w, b, m, v: ops.batch_norm_act(x, w, b, m, v, *BN, "relu", [], 1)),
    "batch_norm_act-smooth": (NORM, lambda x, w, b, m, v: ops.batch_norm_act(x, w, b, m, v, *BN, "silu", [], 1)),
    "batch_norm_act-eval": (NORM, lambda x, w, b, m, v: ops.batch_norm_act(x, w, b, m, v, False, *BN[1:], "relu", [], 1)),
    "batch_norm_add_act": ([*NORM, MAP], lambda x, w, b, y, m, v: ops.batch_norm_add_act(x, w, b, m, v, *BN, y, "relu", [], 1)),
    "batch_norm_act_max_pool2d": (
        NORM,
        lambda x, w, b, m, v: ops.batch_norm_act_max_pool2d(x, w, b, m, v, *BN, "relu", [], [3, 3], [2, 2], [1, 1], [1, 1], False, 1),
    ),
    "instance_norm_act": (NORM, lambda x, w, b, m, v: ops.instance_norm_act(x, w, b, m, v, *BN, "relu", [], 1)),
    "conv_batch_norm_act": (
        [MAP, (8, 8, 3, 3), *NORM[1:]],
        lambda x, k, w, b, m, v: ops.conv_batch_norm_act(x, k, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, w, b, m, v, *BN, "relu", [], True),
    ),
    "layer_norm": ([(2, 64, 32), (32,), (32,)], lambda x, w, b: ops.layer_norm(x, [32], w, b, 1e-5, True, 1)),
    "group_norm": (NORM, lambda x, w, b: ops.group_norm(x, 4, w, b, 1e-5, True, 1)),
    "group_norm_act": (NORM, lambda x, w, b: ops.group_norm_act(x, 4, w, b, 1e-5, True, "silu", [], 1)),
    "conv1d": ([(2, 8, 200), (8, 8, 3), (8,)], lambda x, w, b: ops.conv1d(x, w, b, [1], [1], [1], 1, 1)),
    "conv2d": ([MAP, (8, 4, 3, 3), (8,)], lambda x, w, b: ops.conv2d(x, w, b, [1, 1], [1, 1], [1, 1], 2, 1)),
    "conv2d-same": ([MAP, (8, 8, 2, 3), (8,)], lambda x, w, b: ops.conv2d(x, w, b, [1, 1], "same", [1, 1], 1, 1)),
    "conv3d": ([(1, 4, 6, 8, 8), (4, 4, 3, 3, 3), (4,)], lambda x, w, b: ops.conv3d(x, w, b)),
    "conv_transpose2d": ([MAP, (8, 8, 2, 2), (8,)], lambda x, w, b: ops.conv_transpose2d(x, w, b, [2, 2])),
    "linear": ([(4, 64, 16), (24, 16), (24,)], lambda x, w, b: ops.linear(x, w, b, 1)),
    "matmul": ([(4, 32, 24), (4, 24, 32)], lambda x, y: ops.matmul(x, y, 1)),
    "softmax": ([(4, 32, 64)], lambda x: ops.softmax(x, -1, None, 1)),
    "attention": ([(2, 2, 32, 16)] * 3, lambda q, k, v: ops.scaled_dot_product_attention(q, k, v)),
    "dropout": ([MAP], lambda x: ops.dropout(x, 0.3, True, False, 1)),
    "dropout-1": ([MAP], lambda x: ops.dropout(x, 1.0, True, True, 1)),
    "feature_dropout": ([MAP], lambda x: ops.feature_dropout(x, 0.3, True, 1)),
    "alpha_dropout": ([MAP], lambda x: ops.alpha_dropout(x, 0.3, True, 1)),
    "feature_alpha_dropout": ([MAP], lambda x: ops.feature_alpha_dropout(x, 0.3, True, 1)),
    "max_pool1d": ([(2, 8, 200)], lambda x: ops.max_pool1d(x, [3])),
    "max_pool2d": ([MAP], lambda x: ops.max_pool2d(x, [2, 2], [], [0, 0], [1, 1], False, 1)),
    "max_pool3d": ([(2, 4, 8, 8, 8)], lambda x: ops.max_pool3d(x, [2])),
    "adaptive_max_pool2d": ([MAP], lambda x: ops.adaptive_max_pool2d(x, [3, 5], 1)),
    "avg_pool2d": ([MAP], lambda x: ops.avg_pool2d(x, [2, 2])),
    "adaptive_avg_pool2d": ([MAP], lambda x: ops.adaptive_avg_pool2d(x, [3, 2])),
    "pad": ([MAP], lambda x: ops.pad(x, [1, 2, 0, 1], "reflect")),
    "reflection_pad2d": ([MAP], lambda x: ops.reflection_pad2d(x, [1, 2, 0, 1])),
    "replication_pad2d": ([MAP], lambda x: ops.replication_pad2d(x, [1, 2, 0, 1])),
    "contiguous": ([MAP], lambda x: ops.contiguous(x.permute(0, 2, 3, 1), recompute=1)),
    "reshape": ([MAP], lambda x: ops.reshape(x.permute(0, 2, 3, 1), [2, -1], 1)),
    "roll": ([MAP], lambda x: ops.roll(x, [2, 3], [2, 3], 1)),
}


# Convolutions ask for the same in bfloat16, and are slow.
@pytest.mark.parametrize("name,dtype", [(n, d) for n in OPS for d in (torch.float32, torch.bfloat16) if d == torch.float32 or not n.startswith("conv")])
def test_op(faults, name, dtype):
    shapes, f = OPS[name]
    wanted = [set(range(len(shapes)))] + ([{i} for i in range(len(shapes))] if len(shapes) > 1 else [])
    for some in wanted:
        tensors = [draw(*s, dtype=dtype).requires_grad_(i in some) for i, s in enumerate(shapes)]
        running = f.__code__.co_argcount > len(shapes)
        statistics = [draw(8, dtype=dtype), draw(8, dtype=dtype).abs() + 0.5] if running else []
        # After the op one that would keep its output, so that it is recomputed.
        step = Step(lambda *a: ops.act(pick(f(*a)), "silu", []), [*tensors, *statistics], [tensors[i] for i in sorted(some)], statistics)
        exhaust(faults, step, twice=len(some) == len(shapes))


@pytest.mark.parametrize("recompute", (0, 1, 2))
def test_network(faults, recompute):
    """What is recomputed, held for neighbours or made anew by each, from chains of recipes."""
    p = parameters(dtype=torch.float32)
    x = draw(2, 8, 24, 24).requires_grad_()
    exhaust(faults, Step(lambda x: network(x, p, recompute), [x], [x, *p]))


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.b1(self.c1(x)))
        return torch.relu(self.b2(self.c2(self.drop(y))) + x)


class Net(nn.Module):
    """Convolution, norm, ReLU, pool, residuals, dropout, attention."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.layers = nn.Sequential(Block())  # chains of them: test_network
        self.ln, self.qkv, self.out, self.head = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.pool(torch.relu(self.norm(self.stem(x)))))
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.ln(x)).unflatten(-1, [3, 2, 4]).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(nn.functional.gelu(self.out(y)))
        return self.head(x.mean(1))


REWRITES = {
    "regions": dict(),
    "ops": dict(level="ops"),
    "checkpoint": dict(checkpoint="layers.*"),
    "plan": dict(input="4x3x24x24", budget="50%", no_verify=True),
    "amp": dict(amp="bf16"),
}


def rewritten(module, **options):
    torch.manual_seed(0)
    scripted = torch.jit.script(module)
    if "budget" not in options:
        return tsmem.rewrite(scripted, **options)
    # A plan measures what PyTorch's allocator reports, and the one here reports nothing: another process makes it.
    with tempfile.TemporaryDirectory() as folder:
        scripted.save(f"{folder}/old.pt")
        done = command_line.run("rewrite", f"{folder}/old.pt", "-o", f"{folder}/new.pt", *(f"--{k}={v}" for k, v in options.items() if v is not True), "--no-verify")
        assert done.returncode == 0, done.stderr
        return torch.jit.load(f"{folder}/new.pt")


def whole(model, inputs, context=contextlib.nullcontext):
    leaves = [*[x for x in inputs if x.requires_grad], *model.parameters()]
    # Not num_batches_tracked: it is counted before the norm runs, by PyTorch as well.
    return Step(model, inputs, leaves, [b for b in model.buffers() if b.is_floating_point()], context)


@pytest.mark.parametrize("how", REWRITES)
def test_model(faults, how):
    torch.manual_seed(0)
    model = rewritten(Net(), **REWRITES[how])
    exhaust(faults, whole(model, [draw(4, 3, 24, 24).requires_grad_()]), twice=how == "checkpoint")


def test_model_under_autocast(faults):
    torch.manual_seed(0)
    model = rewritten(Block())
    exhaust(faults, whole(model, [draw(4, 8, 12, 12).requires_grad_()], lambda: torch.autocast("cpu", torch.bfloat16)), twice=False)


@pytest.mark.parametrize("name", ("squeeze-excite", "dropouts", "attention"))
def test_small_model(faults, name):
    torch.manual_seed(0)
    make = small.MODELS[name]
    exhaust(faults, whole(rewritten(make()), [draw(2, 3, 16, 16).requires_grad_()]), twice=False)
