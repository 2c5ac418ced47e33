"""Models that ask a dictionary or a list of their own which layers' results they give out, as torchvision's backbones of detection and segmentation do."""
import copy
from typing import Dict, List

import pytest
import torch
import torchvision
from torch import nn

import conftest
from command_line import run

conftest.load()


class Chosen(nn.Module):
    """The layers' results that `chosen` names."""

    chosen: Dict[str, str]

    def __init__(self, chosen):
        super().__init__()
        self.layers = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3, padding=1), "norm": nn.BatchNorm2d(8), "relu": nn.ReLU(inplace=True), "pool": nn.MaxPool2d(3, 2, 1)})
        self.chosen = chosen

    def forward(self, x) -> Dict[str, torch.Tensor]:
        out: Dict[str, torch.Tensor] = {}
        for name, layer in self.layers.items():
            x = layer(x)
            if name in self.chosen:
                out[self.chosen[name]] = x
        return out


class LeftOut(Chosen):
    """By a list of what is not given out."""

    left: List[str]

    def __init__(self):
        super().__init__({"pool": "out"})
        self.left = ["conv", "norm", "relu"]

    def forward(self, x) -> Dict[str, torch.Tensor]:
        out: Dict[str, torch.Tensor] = {}
        for name, layer in self.layers.items():
            x = layer(x)
            if name not in self.left:
                out[name] = x
        return out


class Chooses(Chosen):
    """A method changes the choice."""

    @torch.jit.export
    def choose(self, name: str):
        self.chosen[name] = name


class Replaces(Chosen):
    @torch.jit.export
    def choose(self, name: str):
        self.chosen = {name: name}


class HandsOn(Chosen):
    @torch.jit.export
    def choice(self) -> Dict[str, str]:
        return self.chosen


class Two(nn.Module):
    """Two of one class with other choices: what is one's is not the other's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Chosen({"pool": "out"}), Chosen({"norm": "out"})

    def forward(self, x):
        return self.a(x)["out"], self.b(x)["out"]


def rewritten(model, tmp_path, *options):
    """Both, loaded."""
    torch.manual_seed(0)
    torch.jit.script(model).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", *options)
    assert done.returncode == 0, done.stderr
    return [torch.jit.load(str(tmp_path / f"{name}.pt")) for name in ("original", "rewritten")]


def same(original, new, shape=(2, 3, 12, 12)):
    for training in (True, False):
        for call in range(3):
            results = []
            for model in (original, new):
                model.train(training)
                model.zero_grad()
                torch.manual_seed(call)
                x = torch.randn(shape, dtype=next(model.parameters()).dtype, requires_grad=True)
                out = model(x)
                outs = list(out.values()) if isinstance(out, dict) else list(out)
                sum(o.square().sum() for o in outs).backward()
                results.append([*outs, x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
            for ours, theirs in zip(*reversed(results), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("level", ["regions", "ops"])
@pytest.mark.parametrize("model", [Chosen({"pool": "out"}), Chosen({"conv": "c", "pool": "out"}), LeftOut()], ids=["last", "first and last", "list"])
def test_what_stands_between_results_is_one(model, level, tmp_path):
    original, new = rewritten(copy.deepcopy(model).double(), tmp_path, "--level", level)
    assert "batch_norm_act_max_pool2d" in new.code
    same(original, new)


@pytest.mark.parametrize("model", [Chosen({"norm": "n", "pool": "out"}), Chooses({"pool": "out"}), Replaces({"pool": "out"}), HandsOn({"pool": "out"})], ids=["given out", "changed", "replaced", "handed on"])
def test_what_may_be_given_out_stays(model, tmp_path):
    original, new = rewritten(copy.deepcopy(model).double(), tmp_path)
    assert not any("batch_norm_act_max_pool2d" in m.code for m in new.modules() if hasattr(m, "code"))
    same(original, new)
    if hasattr(new, "choose"):
        for m in (original, new):
            m.choose("norm")
        same(original, new)


def test_two_with_other_choices(tmp_path):
    original, new = rewritten(Two().double(), tmp_path)
    assert new.code.count("batch_norm_act_max_pool2d") == 1 and "batch_norm_act_max_pool2d" not in new.a.code
    same(original, new)


def test_another_choice_from_outside_is_refused(tmp_path):
    original, new = rewritten(Chosen({"pool": "out"}), tmp_path)
    new.chosen = {"norm": "out"}
    with pytest.raises(torch.jit.Error, match="chosen is not what it was when this model was rewritten"):
        new(torch.randn(2, 3, 12, 12))


def test_restored(tmp_path):
    original, _ = rewritten(Chosen({"pool": "out"}).double(), tmp_path)
    assert run("rewrite", "--restore", tmp_path / "rewritten.pt", "-o", tmp_path / "restored.pt").returncode == 0
    restored = torch.jit.load(str(tmp_path / "restored.pt"))
    assert restored.code == original.code
    restored.chosen = {"norm": "out"}
    same(original, torch.jit.load(str(tmp_path / "restored.pt")))


def test_a_backbone_of_torchvision(tmp_path):
    backbone = torchvision.models._utils.IntermediateLayerGetter(torchvision.models.resnet18(weights=None), {"layer1": "a", "layer4": "b"}).double()
    original, new = rewritten(backbone, tmp_path)
    assert "batch_norm_act_max_pool2d" in new.code
    same(original, new, (4, 3, 64, 64))
