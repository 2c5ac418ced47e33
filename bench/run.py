"""`make bench`: memory and time of rewritten models against their originals, the time of a rewrite, and every Google Benchmark program.

    python bench/run.py [--models tv:resnet18 ...] [--only memory|peers|eager|plans|validation|rewrite|verify|programs] [--batch 4] [--size 224] [--rounds 5] [--level ops]

Prints tables, and writes build/bench/*.json. Ratios are rewritten / original, in one process that runs both in turns.
"""
import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "fixtures"), str(ROOT / "python")]
TOOL = os.environ.get("TSMEM_BIN", str(ROOT / "build" / "bin" / "tsmem"))
OUT = ROOT / "build" / "bench"
MODELS = ["tv:resnet18", "tv:resnet50", "tv:densenet121", "tv:mobilenet_v3_large", "tv:efficientnet_b0", "tv:vgg11_bn"]


def rewritten(model: Path, folder: Path, level: str = "regions") -> Path:
    out = folder / (model.stem + ".mem.pt")
    subprocess.run([TOOL, "rewrite", str(model), "-o", str(out), "--force", "--quiet", "--level", level], check=True, stdout=subprocess.DEVNULL)
    return out


def pair_of(name: str, folder: Path, level: str = "regions") -> tuple:
    import torch

    import models

    model, _ = models.cached(name)
    return tuple(torch.jit.load(str(p)).train() for p in (model, rewritten(model, folder, level)))


def memory(a, folder: Path) -> list:
    """Bytes saved for backward, peak and step time, for each model and each way of training."""
    import torch

    import allocator
    from settings import SETTINGS, needs_input_grad

    rows = []
    print(f"\nOne training step, {a.batch}x3x{a.size}x{a.size}, float32, {torch.get_num_threads()} threads")
    print(f"{'model':26}{'setting':30}{'saved MiB':>19}{'ratio':>7}{'peak ratio':>12}{'time ratio':>12}")
    for name in a.models:
        for setting, apply in SETTINGS.items():
            pair = [apply(m) for m in pair_of(name, folder, a.level)]
            torch.manual_seed(0)
            x = torch.randn(a.batch, 3, a.size, a.size, requires_grad=needs_input_grad(setting))
            if x.requires_grad:
                x.grad = torch.zeros_like(x)
            before, after = (allocator.memory(m, (x,)) for m in pair)
            times = allocator.times(pair, (x,), a.rounds)
            rows.append({"model": name, "setting": setting, "batch": a.batch, "size": a.size, "saved_bytes": [before.saved, after.saved],
                         "peak_bytes": [before.peak, after.peak], "step_seconds": times.seconds, "time_ratio": times.ratios[1]})
            print(f"{name:26}{setting:30}{before.saved / 2**20:9.1f} {after.saved / 2**20:9.1f}{after.saved / before.saved:7.3f}"
                  f"{after.peak / before.peak:12.3f}{times.ratios[1]:12.3f}", flush=True)
    return rows


def checkpointed(model):
    """torch.utils.checkpoint around each block: the children with children of their own, of the model's Sequentials."""
    import torch
    from torch.utils.checkpoint import checkpoint

    for parent in model.children():
        if isinstance(parent, torch.nn.Sequential):
            for block in parent.children():
                if any(True for _ in block.children()):
                    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def compiled(model, budget: float, x):
    """torch.compile with a budget of activations, compiled here: the budget is a global setting."""
    import torch
    import torch._functorch.config as config

    fast = torch.compile(model, backend="aot_eager")
    with config.patch(activation_memory_budget=budget):
        fast(x).sum().backward()
    return fast


def peers(a, folder: Path) -> list:
    """All trainable: this tool's files beside what else there is, in turns; ratios to the scripted original."""
    import torch

    import allocator
    import models

    rows = []
    print(f"\nBeside others: one training step, {a.batch}x3x{a.size}x{a.size}, float32, all trainable, ratios to scripted")
    print(f"{'model':26}{'':34}{'saved':>7}{'peak':>7}{'time':>7}")
    for name in a.models:
        scripted, new = pair_of(name, folder)
        torch.manual_seed(0)
        x = torch.randn(a.batch, 3, a.size, a.size)
        variants = {
            "scripted": scripted,
            "eager": models.build(name).train(),
            "tsmem": new,
            "torch.utils.checkpoint, blocks": checkpointed(models.build(name).train()),
            **{f"torch.compile, budget {b}": compiled(models.build(name).train(), b, x) for b in (0.5, 0.25)},
        }
        measured = [allocator.memory(m, (x,)) for m in variants.values()]
        times = allocator.times(list(variants.values()), (x,), a.rounds)
        for variant, m, seconds, ratio in zip(variants, measured, *times):
            rows.append({"model": name, "variant": variant, "saved_bytes": m.saved, "peak_bytes": m.peak, "step_seconds": seconds, "time_ratio": ratio})
            print(f"{name:26}{variant:34}{m.saved / measured[0].saved:7.3f}{m.peak / measured[0].peak:7.3f}{ratio:7.3f}", flush=True)
    return rows


def eager(a, folder: Path) -> list:
    """Eager models: torch.compile(backend="tsmem") beside the other backends that keep autograd's numbers, in turns; ratios to eager."""
    import torch
    import torch._functorch.config as config

    import allocator
    import models

    def by(backend: str, budget: float, model, x):
        fast = torch.compile(model, backend=backend, dynamic=False)
        with config.patch(activation_memory_budget=budget):  # a global setting, read while compiling
            fast(x).sum().backward()
        return fast

    rows = []
    backends = [("tsmem", 1.0), ("aot_eager", 1.0), ("aot_eager", 0.5), ("inductor", 1.0), ("inductor", 0.5)]
    print(f"\nEager models, {a.batch}x3x{a.size}x{a.size}, float32, all trainable, ratios to eager")
    print(f"{'model':26}{'':24}{'saved':>7}{'peak':>7}{'time':>7}{'first call s':>14}")
    for name in a.models:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(a.batch, 3, a.size, a.size)
        variants, first = {"eager": models.build(name).train()}, [0.0]
        for backend, budget in backends:
            start = time.perf_counter()
            label = backend if backend == "tsmem" else f"{backend}, budget {budget:g}"
            variants[label] = by(backend, budget, models.build(name).train(), x)
            first.append(time.perf_counter() - start)
        measured = [allocator.memory(m, (x,)) for m in variants.values()]
        times = allocator.times(list(variants.values()), (x,), a.rounds)
        for variant, m, seconds, ratio, compiling in zip(variants, measured, *times, first):
            rows.append({"model": name, "variant": variant, "saved_bytes": m.saved, "peak_bytes": m.peak, "step_seconds": seconds, "time_ratio": ratio,
                         "first_call_seconds": compiling})
            print(f"{name:26}{variant:24}{m.saved / measured[0].saved:7.3f}{m.peak / measured[0].peak:7.3f}{ratio:7.3f}{compiling:14.1f}", flush=True)
    return rows


def validation(a, folder: Path) -> list:
    """Forward alone under no_grad, in eval mode."""
    import torch

    import allocator

    rows = []
    print("\nValidation: forward under no_grad, eval mode")
    print(f"{'model':26}{'peak ratio':>12}{'time ratio':>12}")
    for name in a.models:
        pair = [m.eval() for m in pair_of(name, folder, a.level)]
        x = torch.randn(a.batch, 3, a.size, a.size)
        peaks = [allocator.validation_peak(m, (x,)) for m in pair]
        times = allocator.times(pair, (x,), 2 * a.rounds, grad=False)
        rows.append({"model": name, "peak_bytes": peaks, "seconds": times.seconds, "time_ratio": times.ratios[1]})
        print(f"{name:26}{peaks[1] / peaks[0]:12.3f}{times.ratios[1]:12.3f}", flush=True)
    return rows


def chain(nodes: int, path: Path) -> None:
    """A TorchScript file of about so many operators: batch norm, ReLU, convolution, again and again.

    A thousand operators a module: LibTorch's own time to save and load grows with the square of a method's length.
    """
    import torch

    def part(blocks: int) -> torch.jit.ScriptModule:
        class Part(torch.nn.Module):  # of this call alone: TorchScript shares a class's methods
            pass

        p = Part()
        p.w, p.g = torch.nn.Parameter(torch.randn(4, 4, 1, 1)), torch.nn.Parameter(torch.ones(4))
        p.register_buffer("m", torch.zeros(4))
        p.register_buffer("v", torch.ones(4))
        module = torch.jit.script(p)
        lines = ["def forward(self, x):", "    w = self.w", "    g = self.g", "    m = self.m", "    v = self.v"]
        lines += ["    x = torch.conv2d(torch.relu(torch.batch_norm(x, g, g, m, v, True, 0.1, 1e-5, False)), w)"] * blocks
        module.define("\n".join(lines + ["    return x"]) + "\n")
        return module

    torch.jit.script(torch.nn.Sequential(*(part(333) for _ in range(max(nodes // 1000, 1))))).save(str(path))


def rewrite(a, folder: Path) -> list:
    """Time of a rewrite against the size of the graph, beside what starting the tool and loading the file take."""
    import torch

    def timed(*command) -> float:
        start = time.perf_counter()
        subprocess.run([TOOL, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    rows = []
    start = min(timed("--version") for _ in range(3))
    print(f"\nTime of `tsmem rewrite` by graph size; starting the tool takes {start:.2f} s")
    print(f"{'operators':>10}{'all, s':>10}{'loading, s':>12}{'us an operator beyond both':>28}")
    for nodes in (1_000, 3_000, 10_000, 30_000, 100_000):
        path = folder / f"chain{nodes}.pt"
        chain(nodes, path)
        begun = time.perf_counter()
        torch.jit.load(str(path))
        load = time.perf_counter() - begun
        total = timed("rewrite", path, "-o", folder / "out.pt", "--force", "--quiet")
        rows.append({"operators": nodes, "seconds": total, "start_seconds": start, "load_seconds": load})
        print(f"{nodes:10}{total:10.2f}{load:12.2f}{(total - load - start) / nodes * 1e6:28.1f}", flush=True)
    return rows


def verify(a, folder: Path) -> list:
    """Seconds of `verify` and of `rewrite --input`, start and loading included, against the first model's training step."""
    import models

    rows, shape = [], f"{a.batch}x3x{a.size}x{a.size}"
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    print(f"\nVerification, {shape} (x: on the model's own example instead)")
    print(f"{'model':42}{'step s':>9}{'verify s':>10}{'steps':>7}{'rewrite s':>11}{'calls':>7}  result")
    for name in a.models:
        model, example = models.cached(name)
        report, new = folder / "verify.json", folder / "verified.pt"
        options = ["--input", shape]
        kind, own = models._torchvision_kind(name[3:]) if name.startswith("tv:") else "", " "
        if kind in ("detection", "optical_flow", "video"):
            options, own = ["--inputs", f"@{example}"], "x"
        seconds, codes = [], []
        for command in (["rewrite", model, "-o", new, "--force", "--quiet", *options],
                        ["verify", model, new, "--quiet", "--json", report, *options]):
            start = time.perf_counter()
            codes.append(subprocess.run([TOOL, *map(str, command)], env=environment, stdout=subprocess.DEVNULL).returncode)
            seconds.append(time.perf_counter() - start)
        found = json.loads(report.read_text()) if codes[1] in (0, 1) else {"first_step_seconds": float("nan"), "calls": [], "compared": [], "thorough": None, "verdict": ""}
        step = found["first_step_seconds"]
        rows.append({"model": name, "inputs": options[1], "step_seconds": step, "verify_seconds": seconds[1], "rewrite_seconds": seconds[0], "codes": codes,
                     "compared": found["compared"], "thorough": found["thorough"], "verdict": found["verdict"]})
        print(f"{name:40}{own:2}{step:9.2f}{seconds[1]:10.1f}{seconds[1] / step:7.1f}{seconds[0]:11.1f}{len(found['calls']):7}  {codes[0]} {codes[1]}", flush=True)
        report.unlink(missing_ok=True)
        new.unlink(missing_ok=True)
    return rows


def programs(a, folder: Path) -> list:
    """The Google Benchmark programs of bench/, in a build folder of their own."""
    build = ROOT / "build" / "bench-programs"
    if not list((ROOT / "bench").glob("*.cpp")):
        return []
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DTSMEM_BENCH=ON", "-DTSMEM_TESTS=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run([*map(str, configure)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(build)], check=True, stdout=subprocess.DEVNULL)
    rows = []
    for program in sorted((build / "bin").glob("bench_*")):
        report = folder / "report.json"
        subprocess.run([str(program), f"--benchmark_out={report}", "--benchmark_out_format=json"], check=True)
        rows.append({"program": program.name, **json.loads(report.read_text())})
    return rows


def plans(a, folder: Path) -> list:
    """Every budget in ten steps: what was promised beside what the written file needs and takes, in turns with the original."""
    import torch

    import allocator
    import models

    allocator.keep_freed_memory()
    rows = []
    print(f"\nBudgets, {a.batch}x3x{a.size}x{a.size}, float32, all trainable; peaks and times as ratios to scripted")
    print(f"{'model':26}{'budget':>8}{'promised':>10}{'peak':>7}{'off':>8}{'promised':>10}{'time':>7}{'solve s':>9}")
    for name in a.models:
        model, _ = models.cached(name)
        spec = ["--input", f"{a.batch}x3x{a.size}x{a.size}", "--json"]
        front, report = folder / "front.json", folder / "report.json"
        subprocess.run([TOOL, "plan", str(model), *spec, str(front), "-q"], check=True, stdout=subprocess.DEVNULL)
        files, reports = [], []
        for i, point in enumerate(json.loads(front.read_text())["points"]):
            files.append(folder / f"{i}.plan.pt")
            # A per cent for the smallest: another run finds another choice.
            budget = int(point["budget"] * (1.01 if i == 0 else 1))
            subprocess.run([TOOL, "rewrite", str(model), "-o", str(files[-1]), "--force", "-q", "--no-verify", "--budget", str(budget), *spec, str(report)],
                           check=True, stdout=subprocess.DEVNULL)  # fmt: skip
            reports.append(json.loads(report.read_text())["predicted"])
        modules = [torch.jit.load(str(p)).train() for p in (model, *files)]
        torch.manual_seed(0)
        x = torch.randn(a.batch, 3, a.size, a.size)
        peaks = [allocator.memory(m, (x,)).peak for m in modules]
        times = allocator.times(modules, (x,), a.rounds)
        for p, peak, seconds, ratio in zip(reports, peaks[1:], times.seconds[1:], times.ratios[1:]):
            rows.append({"model": name, "predicted": p, "peak_bytes": [peaks[0], peak], "step_seconds": [times.seconds[0], seconds], "time_ratio": ratio})
            whole = p["original_peak_bytes"]
            print(f"{name:26}{p['budget'] / whole:8.3f}{p['peak_bytes'] / whole:10.3f}{peak / peaks[0]:7.3f}{peak / p['peak_bytes'] - 1:8.1%}"
                  f"{p['seconds'] / p['original_seconds']:10.3f}{ratio:7.3f}{p['solve_seconds']:9.1f}", flush=True)
    return rows


PARTS = {"memory": memory, "peers": peers, "eager": eager, "plans": plans, "validation": validation, "rewrite": rewrite, "verify": verify, "programs": programs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level", choices=("ops", "regions"), default="regions", help="of the rewritten files in the parts memory and validation")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    OUT.mkdir(parents=True, exist_ok=True)
    import tsmem  # noqa: F401  (the operators)

    with tempfile.TemporaryDirectory(prefix="tsmem-bench-") as folder:
        for name, part in PARTS.items():
            if a.only in (None, name):
                (OUT / f"{name}.json").write_text(json.dumps(part(a, Path(folder)), indent=1) + "\n")
    print(f"\nResults in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
