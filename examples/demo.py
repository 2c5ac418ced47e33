"""`make demo`: rewrites a scripted ResNet-50, verifies it, and prints memory and time before and after.

The rewritten file and the report stay in build/demo. The table comes from PyTorch's own profiler, not from the tool.
"""
import json
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "fixtures"), str(ROOT / "python")]

import torch  # noqa: E402

import allocator  # noqa: E402
import models  # noqa: E402
import tsmem  # noqa: E402
from settings import SETTINGS, needs_input_grad  # noqa: E402

BATCH = 4


def run(*command: str, accept=(0,)) -> None:
    shown = [Path(c).relative_to(ROOT) if Path(c).is_absolute() else c for c in command]
    print("$", *shown, flush=True)
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode not in accept:
        sys.exit(f"demo: that ended with exit code {done.returncode}")


def main() -> None:
    warnings.simplefilter("ignore")
    folder = ROOT / "build" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    original, rewritten = folder / "resnet50.pt", folder / "resnet50.mem.pt"
    models.make("tv:resnet50", "script", original)
    tool, size = str(ROOT / "build/bin/tsmem"), f"{BATCH}x3x224x224"
    # --input verifies the numbers as well; a smaller size does for that.
    run(tool, "rewrite", str(original), "-o", str(rewritten), "--force", "--input", "2x3x96x96", "--json", str(folder / "rewrite.json"))
    run(tool, "diff", str(original), str(rewritten), "--stat", accept=(0, 1))

    print(f"\nResNet-50, {size}, float32, {torch.get_num_threads()} threads; one training step, before -> after\n")
    print(f"{'':30}{'saved for backward, MiB':>26}{'peak, MiB':>24}{'step, s':>22}")
    rows = []
    for setting, apply in SETTINGS.items():
        pair = [apply(torch.jit.load(str(path)).train()) for path in (original, rewritten)]
        torch.manual_seed(0)
        inputs = (torch.randn(BATCH, 3, 224, 224, requires_grad=needs_input_grad(setting)),)
        inputs[0].grad = torch.zeros_like(inputs[0]) if inputs[0].requires_grad else None
        a, b = (allocator.memory(m, inputs) for m in pair)
        times = allocator.times(pair, inputs, rounds=3)
        cells = [f"{x / scale:.{d}f} -> {y / scale:.{d}f} ({y / x:.2f})" for x, y, scale, d in
                 ((a.saved, b.saved, 2**20, 1), (a.peak, b.peak, 2**20, 1), (*times.seconds, 1, 2))]
        print(f"{setting:30}{cells[0]:>26}{cells[1]:>24}{cells[2]:>22}", flush=True)
        rows.append({"setting": setting, "saved_bytes": [a.saved, b.saved], "peak_bytes": [a.peak, b.peak], "step_seconds": times.seconds})
    eager = [models.build("tv:resnet50").train() for _ in range(2)]
    pair = [eager[0], torch.compile(eager[1], backend="tsmem", dynamic=False)]
    inputs = (torch.randn(BATCH, 3, 224, 224),)
    a, b = (allocator.memory(m, inputs) for m in pair)
    ratio = allocator.times(pair, inputs, rounds=3).ratios[1]
    print(f'\nEager ResNet-50, torch.compile(model, backend="tsmem"): {a.saved / 2**20:.1f} -> {b.saved / 2**20:.1f} MiB saved for backward ({b.saved / a.saved:.2f}), '
          f"peak {b.peak / a.peak:.2f}, time {ratio:.2f} of eager's")
    rows.append({"setting": "eager", "saved_bytes": [a.saved, b.saved], "peak_bytes": [a.peak, b.peak], "time_ratio": ratio})
    (folder / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nIn {folder.relative_to(ROOT)}: {', '.join(sorted(p.name for p in folder.iterdir()))}")


if __name__ == "__main__":
    main()
