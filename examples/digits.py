"""Trains a small ResNet on scikit-learn's digits three times side by side: as it is, rewritten, and rewritten with --amp bf16 and a budget.

    python examples/digits.py [--epochs 12] [--batch 64] [--out build/digits] [--threads 1]

All start from the same weights and see the same batches and seeds. The folder gets the models, digits.json and digits.svg; docs/training.md shows a run.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler tells on stderr when it starts, and that there is no GPU
# For --threads above 1: OpenMP's threads sleep while they wait. Where something else runs as well, spinning makes such small steps ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import tsmem  # noqa: E402, F401

SIZE = 32
# Without AVX-512 oneDNN has no convolution in bfloat16, and PyTorch's own makes a matrix of its windows.
BUDGET = "35%" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "65%"
ORIGINAL, REWRITTEN, HALF = "original", "rewritten", f"bf16, budget {BUDGET}"
# TorchScript optimises a graph in its first calls: these steps are not timed.
WARM_UP = 3


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def network() -> nn.Module:
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))


def data():
    """Images and labels to train with, then those to test with. The 8x8 images are enlarged, so that there is memory to save."""
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=SIZE, mode="bilinear", align_corners=False)
    labels = torch.tensor(digits.target, dtype=torch.long)
    train, test = (torch.tensor(i) for i in train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target))
    return images[train], labels[train], images[test], labels[test]


def make_models(folder: Path, batch: int, threads: int):
    """Writes the three files, the rewritten ones by the command line tool, and loads them."""
    torch.manual_seed(0)
    torch.jit.script(network()).save(str(folder / "original.pt"))
    tool = os.environ.get("TSMEM_BIN", str(ROOT / "build/bin/tsmem"))
    # The plan is made for the batch that is trained with; --input also has the numbers verified.
    options = {"rewritten.pt": [], "bf16.pt": ["--amp", "bf16", "--budget", BUDGET, "--input", f"{batch}x1x{SIZE}x{SIZE}"]}
    for name, more in options.items():
        command = ["rewrite", "original.pt", "-o", name, "--force", *more]
        print("$ tsmem", *command, flush=True)
        done = subprocess.run([tool, *command], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        if done.returncode:
            sys.exit(f"digits: that ended with exit code {done.returncode}")
        print(flush=True)
    return {name: torch.jit.load(str(folder / file)) for name, file in zip((ORIGINAL, REWRITTEN, HALF), ("original.pt", *options))}


def accuracy(model, images, labels) -> float:
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(120), labels.split(120)))
    model.train()
    return right / len(labels)


def train(models, epochs: int, batch: int):
    """The models take turns at every batch, so that a slow moment of the machine meets them all."""
    images, labels, test_images, test_labels = data()
    optimizers = {name: torch.optim.SGD(m.train().parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4) for name, m in models.items()}
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs * (len(images) // batch)) for o in optimizers.values()]
    steps = {name: {"losses": [], "seconds": []} for name in models}
    curves = {name: {"loss": [], "accuracy": []} for name in models}
    order = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        chosen = [c for c in torch.randperm(len(images), generator=order).split(batch) if len(c) == batch]
        for indices in chosen:
            x, y = images[indices], labels[indices]
            seed = len(steps[ORIGINAL]["losses"])
            for name, model in models.items():
                torch.manual_seed(seed)  # dropout draws the same numbers in every model
                start = time.perf_counter()
                optimizers[name].zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizers[name].step()
                steps[name]["losses"].append(loss.item())
                steps[name]["seconds"].append(time.perf_counter() - start)
            for schedule in schedules:
                schedule.step()
        for name, model in models.items():
            curves[name]["loss"].append(statistics.mean(steps[name]["losses"][-len(chosen):]))
            curves[name]["accuracy"].append(accuracy(model, test_images, test_labels))
        print(f"epoch {epoch + 1:2}:", "; ".join(f"{name} {c['loss'][-1]:.4f} {c['accuracy'][-1]:.3f}" for name, c in curves.items()), flush=True)
    return curves, steps


def memory(model, images, labels):
    """Bytes that forward leaves for backward, and the most that a step has allocated at once: what the allocator reports, above what lived before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        loss = F.cross_entropy(model(images), labels)
        middle = time.time_ns()
        loss.backward()
    events = [(e.start_ns(), e.nbytes()) for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = saved = peak = 0
    for when, size in sorted(events, key=lambda e: e[0]):
        held += size
        peak = max(peak, held)
        if when <= middle:
            saved = held
    return saved, peak


def draw(results, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "digits", "font.size": 9})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(9, 6.2), layout="constrained")
    axes = figure.subplots(2, 2)
    # The second line is thin and dashed, and lies on the first.
    dashed = (0, (4, 3))
    styles = [{"color": "#9ecae1", "linewidth": 5}, {"color": "#08519c", "linewidth": 1.5, "linestyle": dashed}, {"color": "#d94801", "linewidth": 1.5}]
    for axis, key, title in ((axes[0, 0], "loss", "loss in training, mean of an epoch"), (axes[0, 1], "accuracy", "accuracy on the test images")):
        for (name, r), style in zip(results.items(), styles):
            axis.plot(range(1, len(r[key]) + 1), r[key], label=name, **style)
        axis.set_title(title)
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(color="#e5e5e5")
        axis.legend(frameon=False)
    axes[0, 0].set_yscale("log")
    first = results[ORIGINAL]
    for axis, bars, title in (
        (axes[1, 0], {"saved for backward": "saved_bytes", "peak of a step": "peak_bytes"}, "memory, MiB"),
        (axes[1, 1], {"training step": "time_ratio"}, "time, ratio to the original"),
    ):
        for i, ((name, r), style) in enumerate(zip(results.items(), styles)):
            in_bytes = axis is axes[1, 0]
            heights = [r[key] / 2**20 if in_bytes else r[key] for key in bars.values()]
            labels = [f"{h:.1f}\n({r[key] / first[key]:.2f})" if in_bytes else f"{h:.2f}" for h, key in zip(heights, bars.values())]
            drawn = axis.bar([k + (i - 1) * 0.27 for k in range(len(bars))], heights, 0.25, color=style["color"], label=name)
            axis.bar_label(drawn, labels, fontsize=8)
        axis.set_xticks(range(len(bars)), list(bars))
        axis.set_title(title)
        axis.margins(y=0.15)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "digits")
    # With two threads bfloat16 steps become several times slower as soon as other work shares the cores, PyTorch's own too.
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)

    models = make_models(options.out, options.batch, options.threads)
    results, steps = train(models, options.epochs, options.batch)
    images, labels, _, _ = data()
    pytorch, first = steps[ORIGINAL], results[ORIGINAL]
    for name, model in models.items():
        r = results[name]
        r["saved_bytes"], r["peak_bytes"] = memory(model, images[: options.batch], labels[: options.batch])
        # Each step against the original's with the same batch, just before it: other work on the machine falls out.
        ratios = [b / a for a, b in list(zip(pytorch["seconds"], steps[name]["seconds"]))[WARM_UP:]]
        r["time_ratio"] = statistics.median(ratios)
        r["loss_difference"] = max(abs(a - b) for a, b in zip(pytorch["losses"], steps[name]["losses"]))
        r["epoch_loss_difference"] = max(abs(a - b) for a, b in zip(first["loss"], r["loss"]))
        r["step_losses"] = steps[name]["losses"]
    (options.out / "digits.json").write_text(json.dumps(results, indent=1) + "\n")

    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    print(f"\n{options.epochs} epochs, {len(pytorch['losses'])} steps, batch {options.batch}x1x{SIZE}x{SIZE}, {threads}\n")
    print(f"{'':18}{'loss':>8}{'accuracy':>10}{'saved, MiB':>15}{'peak, MiB':>15}{'step, ratio':>13}{'loss differs by':>17}")
    for name, r in results.items():
        cells = [f"{r[k] / 2**20:.1f} ({r[k] / first[k]:.2f})" for k in ("saved_bytes", "peak_bytes")]
        difference = f"{r['epoch_loss_difference']:.4f}" if r is not first else ""
        print(f"{name:18}{r['loss'][-1]:>8.4f}{r['accuracy'][-1]:>10.3f}{cells[0]:>15}{cells[1]:>15}{r['time_ratio']:>13.2f}{difference:>17}")
    try:
        draw(results, options.out / "digits.svg")
    except ImportError:
        print("\nNo picture: matplotlib is not installed.")
    print(f"\nIn {os.path.relpath(options.out)}: {', '.join(sorted(p.name for p in options.out.iterdir()))}")


if __name__ == "__main__":
    main()
