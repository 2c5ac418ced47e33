"""Files that version 0.1 wrote, one of each level: they load, train as the original does, and are restored to it.

fixtures/written_by_0.1 was made by that version's tool, before tsmem::act knew that it overwrites its argument.
"""
from pathlib import Path

import pytest
import torch

import conftest
from command_line import run as tool

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "written_by_0.1"
LEVELS = sorted(p.stem for p in FOLDER.glob("*.pt") if p.stem != "original")


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
    assert LEVELS == ["amp", "checkpoint", "ops", "plan", "regions"]


@pytest.mark.parametrize("level", LEVELS)
def test_trains_as_the_original(level):
    original, rewritten = (torch.jit.load(str(FOLDER / f"{name}.pt")) for name in ("original", level))
    assert "tsmem::" in str(rewritten.inlined_graph) or level == "amp"
    dtype = torch.float32 if level == "amp" else torch.float64
    if level == "amp":  # bfloat16 in forward: of the original's only roughly
        assert all(t.isfinite().all() for t in steps(rewritten, dtype) if t.is_floating_point())
        return
    for a, b in zip(steps(original, dtype), steps(rewritten, dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("level", LEVELS)
def test_is_restored(level, tmp_path):
    import tsmem

    back = tmp_path / "back.pt"
    assert tool("rewrite", FOLDER / f"{level}.pt", "-o", back, "--restore").returncode == 0
    assert tool("diff", FOLDER / "original.pt", back).returncode == 0
    assert "tsmem::" not in str(tsmem.restore(torch.jit.load(str(FOLDER / f"{level}.pt"))).inlined_graph)


@pytest.mark.parametrize("level", LEVELS)
def test_is_rewritten_again(level, tmp_path):
    new = tmp_path / "new.pt"
    done = tool("rewrite", FOLDER / f"{level}.pt", "-o", new, "--input", "4x3x16x16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert tool("verify", FOLDER / "original.pt", new, "--input", "4x3x16x16", "--no-measure").returncode == 0
