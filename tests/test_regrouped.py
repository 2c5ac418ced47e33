"""Where our operators would make TorchScript differentiate together what it keeps apart in the original, and that is seen, the original's code stays."""
import json

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from command_line import run


def hardswish_replaced(a, b):
    a = F.hardswish(a)
    a.copy_(b)
    return a + b


class Overwritten(nn.Module):
    """A product and a hardswish, which the original differentiates apart, and what is copied over the hardswish's result. Not trained here: what TorchScript
    does with it depends on more than the code, so that the original raises in some programs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 4, 8, 8))
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        with torch.no_grad():
            x = F.max_pool2d(x, 3, 1, 1)
        x = self.w * x
        z = self.bn(x)
        y = z.transpose(2, 3).reshape(2, 4, 8, 8)
        return hardswish_replaced(x, y), z


class TwoKindsOfDropout(nn.Module):
    """Those that TorchScript differentiates and that of channels, which it does not: the first ones draw first."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 4, 8, 8))
        self.drops, self.channels = nn.ModuleList([nn.Dropout(0.3), nn.Dropout(0.3)]), nn.Dropout2d(0.3)

    def forward(self, x):
        y = F.silu(x) * self.w
        z = y
        for drop in self.drops:
            z = z + drop(z)
        return self.channels(y.mul(y.sigmoid())), z


class Residual(nn.Module):
    """What is overwritten in the original's groups too."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.bn(self.conv(x))
        y = y * 0.5 + 1.0
        y += x
        return F.relu(y), y.mean()


def trained(module):
    """Outputs and gradients of four calls."""
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        module.zero_grad()
        outputs = module(torch.rand(2, 4, 8, 8, dtype=torch.double))
        torch.autograd.backward([o for o in outputs if o.requires_grad], [torch.ones_like(o) for o in outputs if o.requires_grad])
        found += [o.detach() for o in outputs] + [p.grad for p in module.parameters()]
    return found


@pytest.mark.parametrize("options", [["--level", "ops"], ["--level", "regions"], ["--only", "act-mul"], ["--only", "batch-norm"]], ids=" ".join)
@pytest.mark.parametrize("model", [TwoKindsOfDropout, Residual])
def test_trains_as_the_original(ops, model, options, tmp_path):
    torch.manual_seed(0)
    torch.jit.script(model().double()).save(str(tmp_path / "model.pt"))
    done = run("rewrite", tmp_path / "model.pt", "-o", tmp_path / "new.pt", *options)
    assert done.returncode == 0, done.stderr
    for a, b in zip(*(trained(torch.jit.load(str(tmp_path / name))) for name in ("model.pt", "new.pt")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model,options,reason", [
    (Overwritten, ["--level", "ops"], "TorchScript would differentiate aten::hardswish together with other operators, and its result is overwritten later"),
    (TwoKindsOfDropout, ["--only", "act-mul"], "TorchScript would run its dropouts in another order"),
    (Residual, ["--level", "ops"], None),
    (Overwritten, ["--level", "regions"], None),
])
def test_says_so(model, options, reason, tmp_path):
    torch.manual_seed(0)
    torch.jit.script(model()).save(str(tmp_path / "model.pt"))
    done = run("rewrite", tmp_path / "model.pt", "-o", tmp_path / "new.pt", *options, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    reasons = [r["reason"] for r in report["refused"]]
    assert any(reason in r for r in reasons) if reason else not any("TorchScript would" in r for r in reasons), (done.stdout, reasons)
    assert bool(report["matches"]) == (reason is None)
