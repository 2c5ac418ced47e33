"""What bench/cuda.sh runs; see there. Times are medians of CUDA events, memory is the caching allocator's.

    python bench/gpu.py prepare|sanitize|kernels|each|models|batches [--only NAME ...] [--seconds S] [--again]

Each row of a table is saved as soon as it is known. A run goes on behind the rows that an earlier one has saved on the same device with the same PyTorch, and ends with
exit code 3 where time is up before all are there.

TSMEM_TEST_DEVICE=cpu tries all of this without a device, on small sizes: the figures mean nothing there.
"""
import argparse
import json
import os
import statistics
import resource
import subprocess
import sys
import time
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "fixtures"), str(ROOT / "python"), str(ROOT / "tests")]
OUT = Path(os.environ.get("OUT", ROOT / "build" / "bench"))
MODELS = Path(os.environ.get("TSMEM_CUDA_MODELS", ROOT / "build" / "cuda-models"))
# Name of the fixture, input without the batch, batch.
DEVICE = os.environ.get("TSMEM_TEST_DEVICE", "cuda")
DRY = DEVICE == "cpu"
TABLE = {"resnet50": ("tv:resnet50", (3, 224, 224), 256), "resnet18": ("tv:resnet18", (3, 224, 224), 256),
         "densenet121": ("tv:densenet121", (3, 224, 224), 128), "mobilenet_v2": ("tv:mobilenet_v2", (3, 224, 224), 256),
         "efficientnet_b0": ("tv:efficientnet_b0", (3, 224, 224), 256), "unet": ("unet", (3, 256, 256), 64)}  # fmt: skip
# ResNet-50's feature maps at 224 x 224: channels, side.
SHAPES = [(64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 28), (256, 14), (1024, 14), (512, 14), (512, 7), (2048, 7)]
BATCH, ROTATED, EACH = 64, 1 << 28, (64, 256, 56, 56)  # images of the kernels' maps; bytes of all inputs of a graph; the map of `each`
if DRY:
    TABLE = {"cnn": ("cnn", (3, 32, 32), 2)}
    SHAPES, BATCH, ROTATED, EACH = [(8, 6)], 2, 1 << 12, (2, 8, 6, 6)
TIME_IS_UP = 3


def load_ops():
    import conftest

    return conftest.load()


# --- Model files


def prepare(a):
    """For each model the scripted original and three rewritten ones. Parameters become views of one zero: the files hold code alone."""
    import models

    tool = os.environ.get("TSMEM_BIN", str(ROOT / "build" / "bin" / "tsmem"))
    if not os.path.isfile(tool):
        sys.exit(f"The tool '{tool}' is missing: set TSMEM_BIN to a tsmem program, or run 'make build'.")
    load_ops()
    MODELS.mkdir(parents=True, exist_ok=True)
    for name, (fixture, size, batch) in TABLE.items():
        original, _ = models.cached(fixture)
        files = {"pytorch": original}
        for level in ("ops", "regions"):
            files[level] = MODELS / f"{name}.{level}.full.pt"
            subprocess.run([tool, "rewrite", str(original), "-o", str(files[level]), "--force", "--quiet", "--level", level], check=True, stdout=subprocess.DEVNULL)
        # By shapes and a guess of the link's speed beside this estimate's: which outputs are worth it is to be seen on the device.
        files["offload"] = MODELS / f"{name}.offload.full.pt"
        shape = "x".join(map(str, (batch, *size)))
        plan = ["--budget", "50%", "--input", shape, "--estimate", "--offload", "--link", "40MB"]
        subprocess.run([tool, "rewrite", str(original), "-o", str(files["offload"]), "--force", "--quiet", *plan], check=True, stdout=subprocess.DEVNULL)
        for kind, path in files.items():
            m = torch.jit.load(str(path))
            for p in m.parameters():
                p.data = torch.zeros((), dtype=p.dtype).expand(p.shape)
            m.save(str(MODELS / f"{name}.{kind}.pt"))
            if kind != "pytorch":
                path.unlink()
        print(f"{name}: {', '.join(files)}")


def load(name, kind):
    """The model on the device, channels_last, with weights drawn from seed 0."""
    path = MODELS / f"{name}.{kind}.pt"
    if not path.is_file():
        raise SystemExit(f"{path} is missing: run 'bench/cuda.sh prepare' where the tool and torchvision are, and carry {MODELS} here.")
    m = torch.jit.load(str(path), map_location="cpu").train()
    gen = torch.Generator().manual_seed(0)
    for p in m.parameters():
        fan = max(1, p[0].numel()) if p.dim() > 1 else 1
        p.data = torch.randn(p.shape, generator=gen) * (2 / fan) ** 0.5 if p.dim() > 1 else torch.full(p.shape, 0.5)
    return m.to(DEVICE).to(memory_format=torch.channels_last)


# --- The device


def synchronize():
    if not DRY:
        torch.cuda.synchronize()


def empty_cache():
    if not DRY:
        torch.cuda.empty_cache()


def device_name():
    return "none: a dry run" if DRY else torch.cuda.get_device_name()


def allocated():
    """Bytes in use, and at most since forget_peak()."""
    if DRY:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def forget_peak():
    if not DRY:
        torch.cuda.reset_peak_memory_stats()


def time_of(f):
    """Milliseconds of the device's work in one call."""
    if DRY:
        start = time.perf_counter()
        f()
        return 1e3 * (time.perf_counter() - start)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    f()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


# --- Measuring


def milliseconds(fs, seconds=0.5):
    """Median time of each of the functions, in turns."""
    for f in fs:
        for _ in range(3):
            f()
    times = [[] for _ in fs]
    end = time.monotonic() + seconds * len(fs)
    while time.monotonic() < end or len(times[0]) < 5:
        for f, t in zip(fs, times):
            t.append(time_of(f))
    return [statistics.median(t) for t in times]


def loss_of(y, dtype):
    """Scaled in float16, as a user's GradScaler would, so that gradients are not its smallest numbers."""
    return y.float().square().mean() * (2**12 if dtype == torch.float16 else 1)


def step_of(m, x, dtype=torch.bfloat16):
    def step():
        for p in m.parameters():
            p.grad = None
        with torch.autocast(DEVICE, dtype):
            y = m(x)
        loss_of(y, dtype).backward()

    return step


def memory_of(m, x, dtype=torch.bfloat16):
    """Bytes held after forward, and at the peak of a step, beyond weights, gradients and input."""
    step = step_of(m, x, dtype)
    for _ in range(3):
        step()
    synchronize()
    empty_cache()
    before = allocated()[0]
    forget_peak()
    with torch.autocast(DEVICE, dtype):
        y = m(x)
    saved = allocated()[0] - before
    loss_of(y, dtype).backward()
    return saved, allocated()[1] - before


class Table:
    """Rows by name, in $OUT/cuda-NAME.json. Written anew after each row: what a time limit ends keeps what it has."""

    def __init__(self, name, again):
        self.path, self.rows = OUT / f"cuda-{name}.json", []
        self.where = {"device": device_name(), "torch": torch.__version__}
        if again or not self.path.is_file():
            return
        try:
            found = json.loads(self.path.read_text())
            if {k: found[k] for k in self.where} == self.where:
                self.rows = found["rows"]
        except (ValueError, KeyError, TypeError):
            sys.exit(f"{self.path} is no table of an earlier run: remove it, or start anew with --again.")

    def has(self, **key):
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.rows)

    def add(self, **row):
        self.rows.append(row)
        OUT.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({**self.where, "rows": self.rows}, indent=1))
        new.replace(self.path)


def end_of(a):
    """A function that ends the program where time is up."""
    end = time.monotonic() + a.seconds

    def check():
        if time.monotonic() > end:
            print("(time is up: the next run goes on here)")
            sys.exit(TIME_IS_UP)

    return check


def first_line(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


# --- Tables


def graph_of(f, sets):
    """f over each of the sets of arguments, captured once: what is timed is the device's work alone."""
    if DRY:
        return types.SimpleNamespace(replay=lambda: [f(*arguments) for arguments in sets])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            f(*sets[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            f(*arguments)
    return graph


def kernels(a):
    """Bytes that have to be moved, per second, of forward and of backward of batch norm + ReLU (+ add), and of the stem with its pool.

    Graphs of calls over as many inputs as do not fit in the second-level cache are replayed. torch.compile, which is slow to compile, comes last.
    """
    ops, table, check_time = load_ops(), Table("kernels", a.again), end_of(a)
    pool = ([3, 3], [2, 2], [1, 1], [1, 1], False)

    def pytorch(x, w, b, z):
        y = torch.nn.functional.batch_norm(x, None, None, w, b, True)
        return torch.relu(y + z if z is not None else y)

    def ours(x, w, b, z):
        if z is None:
            return ops.batch_norm_act(x, w, b, None, None, True, 0.1, 1e-5, True, "relu", [])
        return ops.batch_norm_add_act(x, w, b, None, None, True, 0.1, 1e-5, True, z, "relu", [])

    def pytorch_pool(x, w, b, z):
        return torch.max_pool2d(pytorch(x, w, b, z), *pool)

    def our_pool(x, w, b, z):
        return ops.batch_norm_act_max_pool2d(x, w, b, None, None, True, 0.1, 1e-5, True, "relu", [], *pool)

    shapes = [(s, w) for w in ("norm", "norm + add") for s in SHAPES] + [(SHAPES[0], "norm + pool")]
    kinds = [(d, f) for d in (torch.bfloat16, torch.float32) for f in (torch.channels_last, torch.contiguous_format)]
    cases = [(d, f, s, w) for d, f in (kinds[:1] if DRY else kinds) for s, w in shapes]
    print(f"{'who':9}{'dtype':9}{'layout':18}{'channels':>9}{'side':>5}{'what':>12}{'copy GB/s':>11}{'fwd ms':>8}{'share':>7}{'bwd ms':>8}{'share':>7}")
    for who in ("ours", "pytorch", "compiled"):
        for dtype, layout, (channels, side), what in cases:
            if a.only and str(dtype)[6:] not in a.only and who not in a.only:
                continue
            key = {"who": who, "dtype": str(dtype)[6:], "layout": str(layout)[6:], "channels": channels, "side": side, "what": what}
            if table.has(**key):
                continue
            check_time()
            size = BATCH * channels * side * side * dtype.itemsize
            sets = []
            for _ in range(max(2, ROTATED // size)):
                x = torch.randn(BATCH, channels, side, side, device=DEVICE).to(dtype, memory_format=layout).requires_grad_()
                z = torch.randn_like(x).requires_grad_() if what == "norm + add" else None
                sets.append((x, *(torch.rand(channels, device=DEVICE).requires_grad_() for _ in range(2)), z))
            with_pool = what == "norm + pool"
            f = (our_pool if with_pool else ours) if who == "ours" else pytorch_pool if with_pool else pytorch
            if who == "compiled":
                torch._dynamo.reset()  # beyond eight shapes it would run the function as it is
                f = compiled_by(f)
            grad = torch.randn_like(f(*sets[0]))

            def both(*arguments):
                torch.autograd.grad(f(*arguments), [t for t in arguments if t is not None], grad)  # noqa: B023

            to = torch.empty_like(sets[0][0])
            try:
                graphs = [graph_of(g, sets) for g in (lambda x, *_: to.copy_(x.detach()), f, both)]  # noqa: B023
            except Exception as error:
                table.add(**key, error=first_line(error))
                print(f"({who} {what}: {first_line(error)})")
                continue
            copy, forward, whole = (t / len(sets) for t in milliseconds([g.replay for g in graphs], 0.05))
            # Forward reads x twice and writes y; backward reads x and the gradient twice and writes one. With add: z, its gradient and bits besides.
            # With the pool, a quarter of a map each: y, positions (a byte) and the gradient, which is read twice.
            add = what == "norm + add"
            moved = (2.25 + 0.25 / dtype.itemsize, 3.5 + 0.5 / dtype.itemsize) if with_pool else (3 + add * (1 + 1 / 8 / dtype.itemsize), 5 + add)
            row = {"copy_GBps": 2 * size / copy / 1e6, "forward_ms": forward, "backward_ms": whole - forward,
                   "forward_share": moved[0] * size / forward / (2 * size / copy), "backward_share": moved[1] * size / (whole - forward) / (2 * size / copy)}  # fmt: skip
            table.add(**key, **row)
            print(f"{who:9}{key['dtype']:9}{key['layout']:18}{channels:9}{side:5}{what:>12}{row['copy_GBps']:11.0f}{forward:8.3f}{row['forward_share']:7.2f}"
                  f"{whole - forward:8.3f}{row['backward_share']:7.2f}", flush=True)  # fmt: skip
            del graphs, sets, to, grad, f, both
            empty_cache()


def each(a):
    """The time of each kernel, by PyTorch's profiler, of ours and of PyTorch, on one large map."""
    ops, table, check_time = load_ops(), Table("each", a.again), end_of(a)
    activity = torch.profiler.ProfilerActivity.CPU if DRY else torch.profiler.ProfilerActivity.CUDA
    for dtype in (torch.bfloat16,) if DRY else (torch.bfloat16, torch.float32):
        for layout in (torch.channels_last, torch.contiguous_format):
            x = torch.randn(EACH, device=DEVICE).to(dtype, memory_format=layout).requires_grad_()
            z, grad = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
            w, b = (torch.rand(EACH[1], device=DEVICE).requires_grad_() for _ in range(2))
            pool = ([3, 3], [2, 2], [1, 1], [1, 1], False)
            bn = (None, None, True, 0.1, 1e-5, True)
            fs = {
                "ours": lambda: ops.batch_norm_act(x, w, b, *bn, "relu", []),  # noqa: B023
                "ours silu": lambda: ops.batch_norm_act(x, w, b, *bn, "silu", []),  # noqa: B023
                "ours + add": lambda: ops.batch_norm_add_act(x, w, b, *bn, z, "relu", []),  # noqa: B023
                "ours pool": lambda: ops.batch_norm_act_max_pool2d(x, w, b, *bn, "relu", [], *pool),  # noqa: B023
                "ours max_pool": lambda: ops.max_pool2d(x, [3, 3], [2, 2], [1, 1]),  # noqa: B023
                "ours act": lambda: ops.act(x, "relu", []),  # noqa: B023
                "ours dropout": lambda: ops.dropout(x, 0.5, True),  # noqa: B023
                "pytorch": lambda: torch.relu(torch.nn.functional.batch_norm(x, None, None, w, b, True)),  # noqa: B023
                "pytorch max_pool": lambda: torch.max_pool2d(x, *pool),  # noqa: B023
                "pytorch dropout": lambda: torch.dropout(x, 0.5, True),  # noqa: B023
            }
            for name, f in fs.items():
                key = {"dtype": str(dtype)[6:], "layout": str(layout)[6:], "what": name}
                if table.has(**key):
                    continue
                check_time()
                y = f()
                g = grad if y.shape == grad.shape else torch.randn_like(y)
                torch.autograd.grad(y, x, g)
                with torch.profiler.profile(activities=[activity]) as found:
                    for _ in range(5):
                        torch.autograd.grad(f(), x, g)
                    synchronize()
                size = x.numel() * x.element_size()
                print(f"{str(dtype)[6:]} {str(layout)[6:]} {name}: map {size / 1e6:.0f} MB")
                time_in = (lambda e: e.self_cpu_time_total) if DRY else (lambda e: e.device_time_total)
                times = {e.key: time_in(e) / 5 for e in found.key_averages() if time_in(e) > 10}
                for key_of, t in sorted(times.items(), key=lambda kt: -kt[1]):
                    print(f"   {t:8.1f} us, {size / t / 1e6:6.2f} maps a second in TB/s  {key_of[:110]}", flush=True)
                table.add(**key, map_bytes=size, us=times)


def compiled_by(f):
    """By torch.compile; a dry run leaves code generation out."""
    return torch.compile(f, dynamic=False, backend="aot_eager" if DRY else "inductor")


def eager(name):
    """The eager model, where its package is there."""
    import models

    torch.manual_seed(0)
    return models.build(TABLE[name][0]).to(DEVICE).to(memory_format=torch.channels_last)


class Checkpointed(torch.nn.Module):
    """torch.utils.checkpoint around each child (of a Sequential: each of its own) of the eager model's first levels."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        from torch.utils.checkpoint import checkpoint

        def wrap(m):
            inner = m.forward
            m.forward = lambda *args: checkpoint(inner, *args, use_reentrant=False)

        for child in model.children():
            blocks = list(child.children()) if isinstance(child, torch.nn.Sequential) else []
            for block in blocks:
                if any(True for _ in block.parameters()):
                    wrap(block)

    def forward(self, x):
        return self.model(x)


def variants(name):
    """(what, function that makes the model)."""
    yield "pytorch", lambda: load(name, "pytorch")
    yield "tsmem ops", lambda: load(name, "ops")
    yield "tsmem", lambda: load(name, "regions")
    yield "offload", lambda: load(name, "offload")
    yield "checkpoint", lambda: Checkpointed(eager(name))

    def compiled(budget):
        def make():
            import torch._functorch.config as config

            config.activation_memory_budget = budget
            torch._dynamo.reset()
            return compiled_by(eager(name))

        return make

    yield "compile", compiled(1.0)
    yield "compile .5", compiled(0.5)
    # cuDNN's fused graphs take float16.
    yield "pytorch f16", lambda: load(name, "pytorch")
    yield "tsmem f16", lambda: load(name, "regions")
    yield "cudnn f16", lambda: load(name, "regions")


def dtype_of(what):
    """A variant's dtype under autocast; turns cuDNN's fused graphs on for the last one alone."""
    os.environ["TSMEM_CUDNN"] = "1" if what == "cudnn f16" else "0"
    return torch.float16 if what.endswith(" f16") else torch.bfloat16


def models_table(a):
    load_ops()
    table, check_time = Table("models", a.again), end_of(a)
    print(f"{'model':18}{'batch':>6}  {'what':12}{'saved MiB':>10}{'ratio':>7}{'peak MiB':>10}{'ratio':>7}{'ms':>9}{'ratio':>7}")
    for name in a.only or TABLE:
        _, size, batch = TABLE[name]
        x = torch.randn(batch, *size, device=DEVICE).to(memory_format=torch.channels_last)
        for what, make in variants(name):
            key = {"model": name, "batch": batch, "what": what}
            if table.has(**key):
                continue
            check_time()
            try:
                m, dtype = make(), dtype_of(what)
                saved, peak = memory_of(m, x, dtype)
                (ms,) = milliseconds([step_of(m, x, dtype)], 2.0)
            except Exception as error:
                table.add(**key, error=first_line(error))
                print(f"{name:18}{batch:6}  {what:12}({first_line(error)})")
                continue
            finally:
                m = None
                empty_cache()
            table.add(**key, saved=saved, peak=peak, ms=ms)
            of = "pytorch f16" if what.endswith(" f16") else "pytorch"
            first = next((r for r in table.rows if r["model"] == name and r["what"] == of and "ms" in r), table.rows[-1])
            ratios = [now / max(1e-9, first[k]) for k, now in (("saved", saved), ("peak", peak), ("ms", ms))]
            print(f"{name:18}{batch:6}  {what:12}{saved / 2**20:10.0f}{ratios[0]:7.2f}{peak / 2**20:10.0f}{ratios[1]:7.2f}{ms:9.1f}{ratios[2]:7.2f}", flush=True)


def batches(a):
    """The largest batch, in steps of 16, whose training step fits."""
    load_ops()
    table, check_time = Table("batches", a.again), end_of(a)
    for name in a.only or (list(TABLE) if DRY else ("resnet50", "densenet121")):
        _, size, _ = TABLE[name]
        for kind in ("pytorch", "ops", "regions"):
            if table.has(model=name, what=kind):
                continue
            m = load(name, kind)

            def fits(n):
                check_time()
                if DRY and n > 2:  # as if memory ended there
                    return False
                try:
                    x = torch.randn(16 * n, *size, device=DEVICE).to(memory_format=torch.channels_last)
                    for _ in range(3):  # TorchScript changes what is kept between the first calls
                        step_of(m, x)()  # noqa: B023
                    synchronize()
                    return True
                except torch.OutOfMemoryError:
                    return False
                except RuntimeError as error:  # from TorchScript
                    if "out of memory" in str(error):
                        return False
                    raise
                finally:
                    x = None
                    empty_cache()

            low, high = 0, 1 if DRY else 8
            while fits(high):
                low, high = high, 2 * high
            while high - low > max(1, low // 32):
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            table.add(model=name, what=kind, batch=16 * low)
            print(f"{name:18}{kind:10}largest batch {16 * low}", flush=True)
            m = None
            empty_cache()


def sanitize(a):
    """A little of every kernel, for compute-sanitizer."""
    ops = load_ops()
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 16, 7, 7), (2, 5, 9, 3)):
            for last in (False, True):
                x = torch.randn(shape, device=DEVICE).to(dtype)
                x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
                z, w = torch.randn_like(x).requires_grad_(), torch.ones(shape[1], device=DEVICE, dtype=dtype, requires_grad=True)
                bn = (None, None, True, 0.1, 1e-5, True)
                outs = [ops.batch_norm_act(x, w, w, *bn, "silu", []), ops.batch_norm_add_act(x, w, w, *bn, z, "relu", []), ops.act(x, "relu", []),
                        ops.batch_norm_act_max_pool2d(x, w, w, *bn, "relu", [], [3, 3], [2, 2], [1, 1], [1, 1], False), ops.max_pool2d(x, [3, 3], [2, 2], [1, 1]),
                        ops.dropout(x, 0.5, True), ops.mul_act(torch.nn.functional.silu(x), torch.ones(*shape[:2], 1, 1, device=DEVICE, dtype=dtype, requires_grad=True), x, "silu", [])]  # fmt: skip
                torch.autograd.backward([y.float().sum() for y in outs])
    synchronize()
    print("sanitize: every kernel ran")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["prepare", "sanitize", "kernels", "each", "models", "batches"])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=560, help="stop after that many, with exit code 3; the next run goes on there")
    parser.add_argument("--again", action="store_true", help="measure anew what an earlier run has saved")
    a = parser.parse_args()
    if a.command != "prepare" and not DRY and not torch.cuda.is_available():
        sys.exit("bench/gpu.py needs a CUDA device.")
    {"prepare": prepare, "sanitize": sanitize, "kernels": kernels, "each": each, "models": models_table, "batches": batches}[a.command](a)
