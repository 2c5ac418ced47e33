"""Files that other versions wrote, one of each level: they load, train as the original does, and are restored to it.

fixtures/written_by_0.1 was made by that version's tool with torch 2.11, before tsmem::act knew that it overwrites its argument; written_by_torch_2.11 to
written_by_torch_2.15, each version of the range, with these torches by fixtures/written.py.
"""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import conftest
from command_line import run as tool

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ["amp", "checkpoint", "ops", "original", "plan", "regions"]
FOLDERS = sorted((ROOT / "fixtures").glob("written_by_*"))
FILES = [pytest.param(p, id=f"{p.parent.name}-{p.stem}") for folder in FOLDERS for p in sorted(folder.glob("*.pt")) if p.stem != "original"]


def original_of(file):
    return file.with_name("original.pt")


@pytest.fixture(scope="module", autouse=True)
def loaded():
    conftest.load()


def steps(module, device_dtype=torch.float64):
    """[loss and gradients of three training steps, then the state]; with dropout, from the same seeds."""
    module = module.to(device_dtype).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 3, 16, 16, dtype=device_dtype)
        loss = module(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
    return seen + list(module.state_dict().values())


def test_every_level_is_there():
    text = (ROOT / "python" / "torch-versions.txt").read_text()
    oldest, newest = (int(line.split(".")[1]) for line in text.splitlines() if line[:1].isdigit())
    assert [f.name for f in FOLDERS] == ["written_by_0.1", *(f"written_by_torch_2.{minor}" for minor in range(oldest, newest + 1))]
    for folder in FOLDERS:
        assert sorted(p.stem for p in folder.iterdir()) == LEVELS


def test_more_can_be_written(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", ROOT / "fixtures" / "written.py", tmp_path / "new"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(p.stem for p in (tmp_path / "new").iterdir()) == LEVELS


@pytest.mark.parametrize("file", FILES)
def test_trains_as_the_original(file):
    original, rewritten = (torch.jit.load(str(f)) for f in (original_of(file), file))
    amp = file.stem == "amp"
    assert "tsmem::" in str(rewritten.inlined_graph) or amp
    dtype = torch.float32 if amp else torch.float64
    if amp:  # bfloat16 in forward: of the original's only roughly
        assert all(t.isfinite().all() for t in steps(rewritten, dtype) if t.is_floating_point())
        return
    for a, b in zip(steps(original, dtype), steps(rewritten, dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("file", FILES)
def test_is_restored(file, tmp_path):
    import tsmem

    back = tmp_path / "back.pt"
    assert tool("rewrite", file, "-o", back, "--restore").returncode == 0
    assert tool("diff", original_of(file), back).returncode == 0
    assert "tsmem::" not in str(tsmem.restore(torch.jit.load(str(file))).inlined_graph)


@pytest.mark.parametrize("file", FILES)
def test_is_rewritten_again(file, tmp_path):
    new = tmp_path / "new.pt"
    done = tool("rewrite", file, "-o", new)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tool("verify", original_of(file), new, "--input", "4x3x16x16", "--no-measure").returncode == 0
