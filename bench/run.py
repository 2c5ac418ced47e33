"""`make bench`: memory and time of rewritten models against their originals, the time of a rewrite, and every Google Benchmark program.

    python bench/run.py [--models tv:resnet18 ...] [--only memory|peers|eager|plans|validation|rewrite|verify] [--batch 4] [--size 224] [--rounds 5] [--level ops]

Prints tables, and writes build/bench/*.json. Ratios are rewritten / original, in one process that runs both in turns.
"""
import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import types
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


def checkpointed(model, **options):
    """torch.utils.checkpoint around each block: the children with children of their own, of the model's Sequentials and ModuleLists."""
    import torch
    from torch.utils.checkpoint import checkpoint

    for parent in model.children():
        if isinstance(parent, (torch.nn.Sequential, torch.nn.ModuleList)):
            for block in parent.children():
                if any(True for _ in block.children()):
                    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def selectively_checkpointed(model):
    """The same blocks, with a policy that keeps what convolutions, matrix products and attentions make, and nothing else."""
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default]  # fmt: skip
    return checkpointed(model, context_fn=functools.partial(create_selective_checkpoint_contexts, kept))


def of_its_own(model):
    """The model with a forward that no other shares: Dynamo finds what it has compiled by the code, whatever the settings were."""
    f = type(model).forward
    own = types.FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": own})
    return model


def compiled(model, x, backend: str = "aot_eager", **settings):
    """torch.compile, compiled here under these settings of torch._functorch.config: they are global."""
    import torch
    import torch._functorch.config as config

    fast = torch.compile(of_its_own(model), backend=backend, dynamic=False)
    # A solver's name is no part of the cache's key.
    with config.patch(enable_autograd_cache=False, **settings):
        fast(x).sum().backward()
    return fast


def region(model, budget: float, x):
    """The region API: one budget for the whole forward, for a graph has one budget at most."""
    import torch

    class Region(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.autograd.graph.region_activation_memory_budget(budget):
                return self.model(x)

    # The copies into a batch norm's running statistics are never in the region.
    return compiled(Region(), x, activation_memory_budget_require_full_coverage=False)


def input_of(name: str, a):
    """A batch of images: those of models.py for networks that take one size only."""
    import torch

    import models

    torch.manual_seed(0)
    return torch.randn(models.SHAPES.get(name, (a.batch, 3, a.size, a.size)))


def shape_of(x) -> str:
    return "x".join(map(str, x.shape))


def peers(a, folder: Path) -> list:
    """All trainable: this tool's files beside what else there is, and ten budgets of each that takes one."""
    return [row for name in a.models for part in (peer_budgets, peer_variants) for row in part(a, name, folder)]


def peer_variants(a, name: str, folder: Path) -> list:
    """One step of each, in turns; ratios to the scripted original."""
    import torch

    import allocator
    import models

    torch._dynamo.reset()
    scripted, new = pair_of(name, folder)
    x = input_of(name, a)
    build = lambda: models.build(name).train()  # noqa: E731
    variants = {
        "scripted": scripted,
        "eager": build(),
        "tsmem": new,
        "torch.utils.checkpoint, blocks": checkpointed(build()),
        "the same, a policy keeps products": selectively_checkpointed(build()),
        "torch.compile, aot_eager": compiled(build(), x),
        "the same, budget .5": compiled(build(), x, activation_memory_budget=0.5),
        "the same, region API, budget .5": region(build(), 0.5, x),
        "torch.compile, inductor": compiled(build(), x, "inductor"),
    }
    measured = [allocator.memory(m, (x,)) for m in variants.values()]
    times = allocator.times(list(variants.values()), (x,), a.rounds)
    rows = []
    print(f"\n{name}, {shape_of(x)}: one training step, float32, all trainable, ratios to scripted\n{'':36}{'saved':>7}{'peak':>7}{'time':>7}")
    for variant, m, seconds, ratio in zip(variants, measured, *times):
        rows.append({"model": name, "variant": variant, "saved_bytes": m.saved, "peak_bytes": m.peak, "step_seconds": seconds, "time_ratio": ratio})
        print(f"{variant:36}{m.saved / measured[0].saved:7.3f}{m.peak / measured[0].peak:7.3f}{ratio:7.3f}", flush=True)
    return rows


SOLVERS = ["dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg", "dynamic_memory_budget_dp"]
BUDGETS = [i / 10 for i in range(1, 11)]


@contextlib.contextmanager
def partitioner():
    """What torch.compile's partitioner counts: the bytes that budgets are a share of, and of each solver, where one is asked, its answer and its seconds."""
    import torch._functorch.config as config
    from torch._functorch import partitioners

    choose, solve, seen = partitioners.choose_saved_values_set, partitioners._optimize_runtime_with_given_memory, {"answers": {}}

    def bytes_of(nodes) -> int:
        return sum(map(partitioners._size_of, nodes))

    def choosing(graph, info, memory_budget=1):
        if "whole" not in seen:
            seen["whole"] = bytes_of(choose(graph, info, 1)) - bytes_of(info.inputs)
        return choose(graph, info, memory_budget)

    def solving(*args):
        answers = {}
        for solver in SOLVERS:
            with config.patch(activation_memory_budget_solver=solver):
                start = time.perf_counter()
                answers[solver] = solve(*args)
                seen["answers"][solver] = sorted(answers[solver][2]), time.perf_counter() - start
        return answers[config.activation_memory_budget_solver]

    partitioners.choose_saved_values_set, partitioners._optimize_runtime_with_given_memory = choosing, solving
    try:
        yield seen
    finally:
        partitioners.choose_saved_values_set, partitioners._optimize_runtime_with_given_memory = choose, solve


def falls(values: list) -> int:
    """How often a larger budget took less than the one before."""
    return sum(b < a for a, b in zip(values, values[1:]))


def peer_budgets(a, name: str, folder: Path) -> list:
    """Ten budgets. torch.compile's are shares of the bytes it would save, and promise these; this tool's are shares of the peak."""
    import torch

    import allocator
    import models

    x = input_of(name, a)
    path, _ = models.cached(name)
    scripted = torch.jit.load(str(path)).train()
    original, zeroed = allocator.memory(scripted, (x,)), allocator.memory(scripted, (x,), gradients=False)
    print(f"\n{name}, {shape_of(x)}: saved and peak as ratios to scripted; promised is the peak of tsmem, what is saved of the others;"
          " zeroed: the peak after zero_grad(), gradients included; solver of all s")  # fmt: skip
    print(f"{'':32}{'budget':>8}{'promised':>10}{'saved':>8}{'peak':>8}{'zeroed':>8}{'time':>8}{'solver s':>10}{'all s':>8}", flush=True)
    rows = []

    def add(by: str, budget: float, promised: float, model, solver, whole: float) -> None:
        m, made = allocator.memory(model, (x,)), allocator.memory(model, (x,), warmup=0, gradients=False)
        ratio = allocator.times([scripted, model], (x,), a.rounds, warmup=0).ratios[1]
        keep({"model": name, "by": by, "budget": budget, "promised_bytes": promised, "saved_bytes": m.saved, "peak_bytes": m.peak, "zeroed_peak_bytes": made.peak,
              "original": original._asdict(), "original_zeroed_peak_bytes": zeroed.peak, "time_ratio": ratio, "solver_seconds": solver, "seconds": whole})  # fmt: skip

    def keep(r: dict) -> None:
        rows.append(r)
        of, solver = original.peak if r["by"] == "tsmem" else original.saved, r["solver_seconds"]
        print(f"{r['by']:32}{r['budget']:8g}{r['promised_bytes'] / of:10.3f}{r['saved_bytes'] / original.saved:8.3f}{r['peak_bytes'] / original.peak:8.3f}"
              f"{r['zeroed_peak_bytes'] / zeroed.peak:8.3f}{r['time_ratio']:8.3f}{'-' if solver is None else f'{solver:.3f}':>10}{r['seconds']:8.1f}", flush=True)

    for budget in BUDGETS:
        start, report, out = time.perf_counter(), folder / "report.json", folder / "budget.pt"
        report.unlink(missing_ok=True)
        done = subprocess.run([TOOL, "rewrite", str(path), "-o", str(out), "--force", "-q", "--no-verify", "--budget", f"{budget:.0%}", "--input", shape_of(x),
                               "--json", str(report)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
        whole = time.perf_counter() - start
        if done.returncode == 4:  # a smaller budget than any choice needs
            print(f"{'tsmem':32}{budget:8g}  {done.stderr.strip()}", flush=True)
            continue
        done.check_returncode()
        said = json.loads(report.read_text())["predicted"]
        add("tsmem", budget, said["peak_bytes"], torch.jit.load(str(out)).train(), said["solve_seconds"], whole)
    with partitioner() as seen:
        for budget in BUDGETS:
            measured = {}  # by what runs again: solvers that answer the same make the same program
            for solver in SOLVERS:
                again, seconds = seen["answers"].get(solver, (None, None)) if measured else (None, None)
                same = measured.get(str(again))
                if same:
                    keep({**same, "by": solver, "solver_seconds": seconds})
                    continue
                torch._dynamo.reset()
                seen["answers"].clear()
                start = time.perf_counter()
                fast = compiled(models.build(name).train(), x, activation_memory_budget=budget, activation_memory_budget_solver=solver)
                whole = time.perf_counter() - start
                again, seconds = seen["answers"].get(solver, (None, None))
                add(solver, budget, budget * seen["whole"], fast, seconds, whole)
                measured[str(again)] = rows[-1]

    print(f"{'':32}{'saved falls':>12}{'peak falls':>12}{'over promise':>14}   (falls: how often with a larger budget)")
    for who in ["tsmem", *SOLVERS]:
        of, measured = [r for r in rows if r["by"] == who], "peak_bytes" if who == "tsmem" else "saved_bytes"
        over = max(r[measured] / r["promised_bytes"] - 1 for r in of)
        print(f"{who:32}{falls([r['saved_bytes'] for r in of]):12}{falls([r['peak_bytes'] for r in of]):12}{over:14.1%}", flush=True)
    return rows


def eager(a, folder: Path) -> list:
    """Eager models: torch.compile(backend="tsmem") beside the other backends that keep autograd's numbers, in turns; ratios to eager."""
    import torch
    import torch._functorch.config as config

    import allocator
    import models

    def by(backend: str, budget: float, model, x):
        fast = torch.compile(of_its_own(model), backend=backend, dynamic=False)
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


PARTS = {"memory": memory, "peers": peers, "eager": eager, "plans": plans, "validation": validation, "rewrite": rewrite, "verify": verify}


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
