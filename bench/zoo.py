"""What people train, measured: saved and peak memory and time of a training step, rewritten / original, for the models of fixtures/zoo.py.

    python bench/zoo.py [NAME ...] [--door file|compile] [--level ops|regions] [--rounds 7] [--seconds 600] [--page docs/zoo.md]

Each model runs in a process of its own, one thread, float32. The numbers are compared first, in float64 too (`tsmem verify`; through torch.compile against the
eager model). A model that can't be built, rewritten, or whose numbers differ has a row that says so. Prints a table and writes build/bench/zoo.json; --page writes the
table as a page; of named models it changes their rows. Packages: torchvision, timm, transformers, diffusers, monai, torchaudio; what is not installed is said in its row.
"""
import argparse
import collections
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "fixtures"), str(ROOT / "python")]
OUT = ROOT / "build" / "bench" / "zoo.json"
GRADIENTS = 1e-9  # the relative difference that float64 may have


def kept_by(module, inputs: tuple) -> list:
    """What is alive at the end of forward, by the operator that made it: name and bytes, most first."""
    import tsmem

    kept: collections.Counter = collections.Counter()
    for event in tsmem.profile(module, input=inputs, steps=1, warmup=3)["timeline"]:
        if event["phase"] == "backward":
            break
        kept[event["op"]] += event["bytes"]
    return kept.most_common()


def as_file(entry, level: str) -> tuple:
    """The TorchScript original and its rewrite, with what verify says of them and what is still kept."""
    import torch

    import tsmem

    inputs = entry.inputs()
    model = entry.build().train()
    original = torch.jit.script(model) if entry.how == "script" else torch.jit.trace(model, inputs, check_trace=False, strict=False)
    new = tsmem.rewrite(original, level=level)
    verdict = tsmem.verify(original, new, input=inputs, no_measure=True)
    error = max((call["f64_error"] for call in verdict["calls"] if call.get("f64_error") is not None), default=None)
    return original, new, inputs, verdict["equal"], error, kept_by(new, inputs)


def compiled(entry, level: str) -> tuple:
    """The eager model and the compiled one, with the largest difference of their gradients in float64."""
    import copy

    import torch

    inputs = entry.inputs()
    original = entry.build().train()
    doubles = [copy.deepcopy(original).double() for _ in range(2)]
    in_double = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    doubles[1] = torch.compile(doubles[1], backend="tsmem", options={"level": level})
    from allocator import Loss

    loss = Loss()
    for model in doubles:
        torch.manual_seed(0)
        loss(model(*in_double)).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(doubles[0].parameters(), doubles[1].parameters()) if a.grad is not None]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    # A gradient that is zero but for rounding (a bias before a norm) has no digits to compare.
    error = max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-3 * largest) for a, b in pairs)
    torch._dynamo.reset()
    new = torch.compile(copy.deepcopy(original), backend="tsmem", options={"level": level})
    return original, new, inputs, error <= GRADIENTS, error, []


def measured(name: str, door: str, level: str, rounds: int) -> dict:
    import torch

    import allocator
    import zoo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    allocator.keep_freed_memory()
    original, new, inputs, equal, error, kept = (as_file if door == "file" else compiled)(zoo.ZOO[name], level)
    before, after = (allocator.memory(m, inputs) for m in (original, new))
    times = allocator.times((original, new), inputs, rounds)
    return {"saved_bytes": [before.saved, after.saved], "peak_bytes": [before.peak, after.peak], "step_seconds": times.seconds, "time_ratio": times.ratios[1],
            "equal": equal, "f64_error": error, "kept": kept}


def in_a_process(name: str, a) -> dict:
    """What `measured` gives, or the last line of what went wrong."""
    command = [sys.executable, __file__, name, "--child", "--door", a.door, "--level", a.level, "--rounds", str(a.rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=a.seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {a.seconds} s"}
    lines = run.stdout.splitlines()
    if run.returncode == 0 and lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    reasons = [line for line in run.stderr.splitlines() if line.strip()]
    return {"failed": reasons[-1].strip() if reasons else f"ended with {run.returncode}"}


def share(row: dict) -> str:
    """What most of the memory that is left belongs to."""
    kept = [(op, size) for op, size in row["kept"] if size > 0]
    total = max(sum(size for _, size in kept), 1)
    return ", ".join(f"{op} {size / total:.0%}" for op, size in kept[:2])


def cells(row: dict) -> list:
    if "failed" in row:
        return ["", "", "", "", row["failed"]]
    ratio = lambda pair: f"{pair[1] / max(pair[0], 1):.3f}"  # noqa: E731
    error = "" if row["f64_error"] is None else f"{row['f64_error']:.0e}"
    return [ratio(row["saved_bytes"]), ratio(row["peak_bytes"]), f"{row['time_ratio']:.2f}", error if row["equal"] else f"{error} DIFFERENT", share(row)]


HEADERS = ["model", "saved", "peak", "time", "float64", "most of what stays"]


def rows_of(text: str) -> dict:
    """The cells of an earlier page, by model."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {name: rest for name, *rest in rows[2:]}


def page(rows: dict, a, earlier: str = "") -> str:
    import torch

    door = "`tsmem rewrite`, TorchScript" if a.door == "file" else '`torch.compile(model, backend="tsmem")`'
    lines = ["# What people train", "",
             f"One training step, {door}, `--level {a.level}`, torch {torch.__version__.split('+')[0]}, float32, one thread of a CPU; ratios to the original, times taken in turns. "
             "`float64`: the largest relative difference when both run in float64. Failures are rows too.", "",
             "    python bench/zoo.py --page docs/zoo.md", "", "| " + " | ".join(HEADERS) + " |", "|" + "---|" * len(HEADERS)]
    all_cells = rows_of(earlier) | {name: cells(row) for name, row in rows.items()}
    lines += ["| " + " | ".join([name, *row]) + " |" for name, row in all_cells.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of fixtures/zoo.py; all where none is named")
    parser.add_argument("--door", choices=("file", "compile"), default="file", help="TorchScript's rewrite, or torch.compile of the eager model")
    parser.add_argument("--level", choices=("ops", "regions"), default="regions")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    parser.add_argument("--seconds", type=int, default=600, help="a model may take this long")
    parser.add_argument("--page", help="write the table to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    if a.child:
        print(json.dumps(measured(a.names[0], a.door, a.level, a.rounds)))
        return
    import zoo

    unknown = [n for n in a.names if n not in zoo.ZOO]
    if unknown:
        parser.error(f"there is no model {unknown[0]!r}; these are: {', '.join(zoo.ZOO)}")
    rows = {}
    start = time.perf_counter()
    print(f"{HEADERS[0]:34}" + "".join(f"{h:>8}" for h in HEADERS[1:4]) + "  float64  most of what stays")
    for name in a.names or zoo.ZOO:
        rows[name] = in_a_process(name, a)
        saved, peak, taken, error, rest = cells(rows[name])
        print(f"{name:34}{saved:>8}{peak:>8}{taken:>8}  {error:7}  {rest}", flush=True)
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(rows, indent=1) + "\n")  # after each: a run that is cut off has its rows
    if a.page:
        target = Path(a.page)
        target.write_text(page(rows, a, target.read_text() if a.names and target.exists() else ""))
    print(f"{len(rows)} models in {time.perf_counter() - start:.0f} s; {OUT.relative_to(ROOT)}")
    sys.exit(any("failed" not in row and not row["equal"] for row in rows.values()))


if __name__ == "__main__":
    main()
