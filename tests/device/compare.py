"""Models and operators on a device of others (host_device.cpp), beside PyTorch's own on the same device and on the CPU. Prints JSON: a line for each case.

A process of its own: autograd counts the devices once, at the first backward.

    python compare.py libtsmem_host_device.so
"""
import copy
import ctypes
import gc
import io
import itertools
import json
import sys
import types
import warnings

import torch
import torch.nn.functional as F
from torch import nn

warnings.filterwarnings("ignore")
NAME = "host"


def add_device(library):
    """Tells Python of the device; returns what counts its bytes."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device, module.manual_seed_all = lambda: 1, lambda: 0, lambda seed: None
    module.get_rng_state, module.set_rng_state = lambda device=0: torch.zeros(8, dtype=torch.uint8), lambda state, device=0: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._register_device_module(NAME, module)
    counts = ctypes.CDLL(library)
    counts.device_live.restype = counts.device_peak.restype = ctypes.c_int64
    return counts


def relative(a, b):
    """The largest difference, to the largest number of b."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item() if b.numel() else 0.0


def worst(found, expected):
    assert len(found) == len(expected) and all((a is None) == (b is None) for a, b in zip(found, expected))
    return max(relative(a, b) for a, b in zip(found, expected) if a is not None)


# Operators

ACTS = {
    "identity": [], "relu": [], "hardtanh": [-0.5, 0.8], "threshold": [0.1, -0.3], "leaky_relu": [0.01], "hardsigmoid": [], "silu": [], "hardswish": [], "gelu": [],
    "gelu_tanh": [], "sigmoid": [], "tanh": [], "elu": [1.2, 1.1, 0.9], "softplus": [1.3, 5.0], "mish": [], "hardsigmoid_eager": [],
}  # fmt: skip
POOLS = {
    "max_pool2d": lambda x: ops.max_pool2d(x, [3, 2], [2, 2], [1, 0]), "max_pool2d, dilated": lambda x: ops.max_pool2d(x, [2, 3], [1, 2], [1, 1], [2, 1], True),
    "max_pool2d of a large window": lambda x: ops.max_pool2d(x, [5, 9], [1, 1], [2, 4]), "max_pool1d": lambda x: ops.max_pool1d(x.flatten(2), [3], [2], [1]),
    "max_pool3d": lambda x: ops.max_pool3d(x.unsqueeze(2), [1, 2, 2], [1, 2, 1]), "adaptive_max_pool2d": lambda x: ops.adaptive_max_pool2d(x, [2, 4]),
    "adaptive_max_pool1d": lambda x: ops.adaptive_max_pool1d(x.flatten(2), [7]), "adaptive_max_pool3d": lambda x: ops.adaptive_max_pool3d(x.unsqueeze(2), [1, 3, 5]),
}  # fmt: skip
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
ops = torch.ops.tsmem


def norm(training, act, add):
    def run(x, w, b, m, v, z):
        if add:
            return ops.batch_norm_add_act(x, w, b, m, v, training, 0.1, 1e-5, False, z, act, ACTS[act])
        return ops.batch_norm_act(x, w, b, m, v, training, 0.1, 1e-5, False, act, ACTS[act])

    return run


def operators():
    for training, act, add, layout in itertools.product((True, False), ACTS, (False, True), LAYOUTS):
        yield f"batch norm, {'training' if training else 'evaluation'}, {act}{', add' if add else ''}, {layout}", norm(training, act, add), layout
    for act, layout in itertools.product(ACTS, LAYOUTS):
        yield f"group norm, {act}, {layout}", (lambda x, w, b, m, v, z, act=act: ops.group_norm_act(x, 3, w, b, 1e-5, False, act, ACTS[act])), layout
        yield f"{act}, {layout}", (lambda x, w, b, m, v, z, act=act: ops.act(x, act, ACTS[act]) * w.view(-1, 1, 1)), layout
    for layout in LAYOUTS:
        yield f"layer norm, {layout}", (lambda x, w, b, m, v, z: ops.layer_norm(x, [9]) + z), layout
        yield f"group norm alone, {layout}", (lambda x, w, b, m, v, z: ops.group_norm(x, 2, w, b)), layout
        for name, pool in POOLS.items():
            yield f"{name}, {layout}", (lambda x, w, b, m, v, z, pool=pool: pool(x) * w.view(-1, *[1] * (pool(x).dim() - 2))), layout


def arguments(dtype, layout, device):
    torch.manual_seed(0)
    x, z = torch.randn(3, 6, 5, 9), torch.randn(3, 6, 5, 9)
    w, b, m, v = torch.rand(6) + 0.5, torch.randn(6), torch.randn(6), torch.rand(6) + 0.5
    maps = [t.to(dtype).contiguous(memory_format=LAYOUTS[layout]).to(device) for t in (x, z)]
    return [maps[0], *(t.to(dtype).to(device) for t in (w, b, m, v)), maps[1]]


def results(run, args, needs):
    """The output, gradients of those that need one, and running statistics."""
    for t, need in zip((args[0], args[1], args[2], args[5]), needs):
        t.requires_grad_(need)
    out = run(*args)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype).to(out.device)
    wanted = [t for t in args if t.requires_grad]
    grads = torch.autograd.grad(out, wanted, cotangent, allow_unused=True) if wanted and out.requires_grad else []
    assert all(g is None or (g.dtype == t.dtype and g.device == t.device) for g, t in zip(grads, wanted))
    return [out, *grads, args[3], args[4]], out.stride()


def compare_operators():
    """On the device against the same operator on the CPU: in float64, and in float32 and bfloat16 both against float64."""
    for name, run, layout in operators():
        error, off, strides = 0.0, 0.0, True
        for needs in itertools.product((True, False), repeat=4):
            expected, of_cpu = results(run, arguments(torch.float64, layout, "cpu"), needs)
            found, of_device = results(run, arguments(torch.float64, layout, NAME), needs)
            error, strides = max(error, worst(found, expected)), strides and of_cpu == of_device
        for dtype in (torch.float32, torch.bfloat16):
            expected, _ = results(run, [a.double() for a in arguments(dtype, layout, "cpu")], (True,) * 4)
            ours = worst(results(run, arguments(dtype, layout, NAME), (True,) * 4)[0], expected)
            off = max(off, ours / (64 * torch.finfo(dtype).eps))
        yield {"operator": name, "error": error, "strides": strides, "off": off}


# What no random number meets: bounds that 16 bits don't have, infinite gradients, sums of many.


def gradient_of(run, x, of_output=1.0):
    x = x.detach().requires_grad_()
    out = run(x)
    (grad,) = torch.autograd.grad(out, x, torch.full_like(out, of_output))
    return grad.cpu()


def compare_borders():
    for dtype, bound in ((torch.bfloat16, 0.7), (torch.float16, 0.7), (torch.bfloat16, 0.3), (torch.float32, 0.7)):
        near = torch.tensor(bound).to(dtype)
        steps = torch.arange(-2, 3, dtype=torch.float64) * torch.finfo(dtype).eps * 0.5
        x = torch.cat([near.double() + steps, -near.double() + steps, steps]).to(dtype)
        found = gradient_of(lambda t: ops.act(t, "hardtanh", [-bound, bound]), x.to(NAME))
        yield {"border": f"hardtanh {dtype} {bound}", "equal": torch.equal(found, gradient_of(lambda t: F.hardtanh(t, -bound, bound), x))}
    for slope, x in itertools.product((0.0, 0.5), (-1.0, 1.0)):
        x = torch.tensor([x])
        found = gradient_of(lambda t: ops.act(t, "leaky_relu", [slope]), x.to(NAME), float("inf"))
        expected = gradient_of(lambda t: F.leaky_relu(t, slope), x, float("inf"))
        yield {"border": f"an infinite gradient of leaky_relu {slope} at {x.item()}", "equal": torch.equal(found.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))}
    torch.manual_seed(0)
    x = torch.zeros(1, 1, 9, 9, dtype=torch.bfloat16)
    x[0, 0, 4, 4] = 1
    x.requires_grad_()
    grad = torch.rand(1, 1, 9, 9).to(torch.bfloat16)
    (exact,) = torch.autograd.grad(F.max_pool2d(x.double(), 5, 1, 2), x, grad.double())
    on_device = x.detach().to(NAME).requires_grad_()
    (found,) = torch.autograd.grad(ops.max_pool2d(on_device, [5], [1], [2]), on_device, grad.to(NAME))
    yield {"border": "a place that many windows share, in 16 bits", "equal": found[0, 0, 4, 4].item() == exact[0, 0, 4, 4].item()}


# Models


class Residual(nn.Module):
    def __init__(self, channels, act):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), act())
        self.b = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.act = act()

    def forward(self, x):
        return self.act(self.b(self.a(x)) + x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def networks():
    yield "residual", nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), *(Residual(32, nn.ReLU) for _ in range(3))), (4, 3, 34, 34)
    yield "swish", nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.SiLU(), Residual(32, nn.Hardswish), nn.Conv2d(32, 32, 3, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU6()), (4, 3, 34, 34)
    yield "group norms", nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 8, 3)), (4, 3, 34, 34)
    yield "encoder", nn.Sequential(Block(64, 4), Block(64, 4)), (4, 64, 64)


def two_steps(model, module, shape, counts):
    """Saved and peak bytes of the second step, its output, gradients and buffers."""
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(NAME)
    out = None
    for _ in range(2):
        for p in module.parameters():
            p.grad.zero_()
        del out
        gc.collect()
        before = counts.device_live()
        counts.device_peak()
        out = model(x)
        saved = counts.device_live() - before - out.nbytes
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype).to(NAME))
    return saved, counts.device_peak() - before, [out, *(p.grad for p in module.parameters()), *module.buffers()]


def compare_models(counts):
    import tsmem

    for name, module, shape in networks():
        module = module.double()
        eager, ours = copy.deepcopy(module).to(NAME), copy.deepcopy(module).to(NAME)
        written = io.BytesIO()
        torch.jit.save(tsmem.rewrite(torch.jit.script(copy.deepcopy(module))), written)
        written.seek(0)
        file = torch.jit.load(written, map_location=NAME)
        torch._dynamo.reset()
        compiled = torch.compile(ours, backend="tsmem", options={"strict": True})
        expected = two_steps(eager, eager, shape, counts)
        for door, model, module in (("torch.compile", compiled, ours), ("file", file, file)):
            found = two_steps(model, module, shape, counts)
            yield {"model": name, "door": door, "saved": found[0] / expected[0], "peak": found[1] / expected[1], "error": worst(found[2], expected[2])}


def autocast():
    """What an operator, and a compiled model, do under the device's autocast."""
    x = torch.randn(2, 3, 8, 8, device=NAME, requires_grad=True)
    with torch.autocast(NAME, torch.bfloat16):
        try:
            ops.conv2d(x, torch.randn(4, 3, 3, 3, device=NAME))
            yield {"autocast": "operator", "says": ""}
        except NotImplementedError as error:
            yield {"autocast": "operator", "says": str(error).splitlines()[0]}
        try:
            torch.compile(nn.Conv2d(3, 4, 3).to(NAME), backend="tsmem", options={"strict": True})(x)
            yield {"autocast": "compiled", "says": ""}
        except Exception as error:
            yield {"autocast": "compiled", "says": str(error)}


if __name__ == "__main__":
    counts = add_device(sys.argv[1])
    import tsmem  # noqa: F401

    for case in itertools.chain(compare_operators(), compare_borders(), compare_models(counts), autocast()):
        print(json.dumps(case), flush=True)
