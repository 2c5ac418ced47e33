"""The library in this process: from Python, without another program or a file."""
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conftest
import models
from command_line import run as tool


@pytest.fixture(scope="module")
def tsmem():
    conftest.load()
    import tsmem

    return tsmem


def tensors(module):
    return [t.clone() for t in module.state_dict().values()]


def test_no_other_program_and_no_file(tmp_path):
    """Nothing may be started, and no file may grow by a byte."""
    code = """
import resource, signal, sys, torch, torchvision, tsmem
module = torch.jit.script(torchvision.models.resnet18())
small = torch.jit.script(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()))
tsmem.rewrite(small)
def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"):
        raise RuntimeError(event)
sys.addaudithook(refuse)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
assert "tsmem::" in str(tsmem.rewrite(module).inlined_graph)
x = torch.randn(2, 3, 16, 16)
new = tsmem.rewrite(small, input=x)
assert "tsmem::" in str(new.inlined_graph) and "tsmem::" not in str(tsmem.restore(new).inlined_graph)
assert tsmem.verify(small, new, input=x)["equal"] and tsmem.profile(new, input=x)["saved_bytes"] > 0
assert tsmem.plan(small, input=x, points=2)["points"] and not tsmem.diff(small, new)["equal"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_operators_with_derivatives_in_python(tsmem):
    """torchvision's roi_align, from 0.29 on: the tool, which has no Python, has no derivative of it."""
    torchvision = pytest.importorskip("torchvision")

    class Boxes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.bn = nn.BatchNorm2d(8)

        def forward(self, x, boxes):
            return torchvision.ops.roi_align(torch.relu(self.bn(self.conv(x))), [boxes], 3)

    x = (torch.randn(1, 3, 16, 16), torch.tensor([[0.0, 0.0, 8.0, 8.0]]))
    new = tsmem.rewrite(torch.jit.script(Boxes()), input=x)
    assert "tsmem::" in str(new.inlined_graph)
    new(*x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in new.parameters()) and new.conv.weight.grad.abs().sum() > 0


def test_shares_nothing_and_leaves_the_module_alone(tsmem):
    module = models.make("cnn")
    x = models.inputs("cnn")
    module(*x)  # has run: TorchScript holds what it has compiled
    before, graph, state = tensors(module), str(module.inlined_graph), torch.get_rng_state()
    new = tsmem.rewrite(module, input=tuple(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(module))) and str(module.inlined_graph) == graph
    assert {p.data_ptr() for p in module.parameters()}.isdisjoint(p.data_ptr() for p in new.parameters())
    for _ in range(4):
        torch.testing.assert_close(new(*x), module(*x), rtol=1e-4, atol=1e-4)
    assert tsmem.verify(tsmem.restore(new), new, input=tuple(x))["equal"]


@pytest.mark.parametrize("name", ["cnn", "frozen-backbone"])
def test_reports_are_the_tools(tsmem, name, tmp_path):
    module, shape = models.make(name), "x".join(str(d) for d in models.inputs(name)[0].shape)
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    module.save(str(old))
    rewritten = tsmem.rewrite(module)
    assert tool("rewrite", old, "-o", new).returncode == 0
    loaded = torch.jit.load(str(new))
    rewritten.save(str(tmp_path / "saved.pt"))  # which changes how a graph is written down
    assert tsmem.diff(loaded, torch.jit.load(str(tmp_path / "saved.pt")))["equal"] and not tsmem.diff(module, rewritten)["equal"]

    def printed(*arguments):
        report = tmp_path / "report.json"
        tool(*arguments, "--json", report)
        return json.loads(report.read_text())

    a, b = tsmem.profile(rewritten, input=shape), printed("profile", new, "--input", shape)
    assert a.keys() == b.keys() and [a[k] for k in ("saved_bytes", "peak_bytes", "input_bytes")] == [b[k] for k in ("saved_bytes", "peak_bytes", "input_bytes")]
    a, b = tsmem.verify(module, rewritten, input=shape), printed("verify", old, new, "--input", shape)
    assert a.keys() == b.keys() and a["equal"] and b["equal"] and a["saved_bytes"] == b["saved_bytes"]
    a, b = tsmem.plan(module, input=shape, points=3, estimate=True), printed("plan", old, "--input", shape, "--points", "3", "--estimate")
    assert a.keys() == b.keys() and [p["predicted_peak_bytes"] for p in a["points"]] == [p["predicted_peak_bytes"] for p in b["points"]]


def test_a_plan_in_the_process(tsmem):
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())]
    module, x = torch.jit.script(nn.Sequential(*layers)), (torch.randn(4, 3, 24, 24),)
    smallest = tsmem.plan(module, input=x, points=2)["smallest_budget"]
    new = tsmem.rewrite(module, input=x, budget=int(1.2 * smallest))
    assert "tsmem::" in str(new.inlined_graph) and tsmem.verify(module, new, input=x)["equal"]
    with pytest.raises(tsmem.Error, match="smallest possible budget") as error:
        tsmem.rewrite(module, input=x, budget="1%")
    assert error.value.kind == "budget"


@pytest.mark.parametrize("function, options, kind, sentence", [
    ("rewrite", {"no_such": 1}, "request", "no option 'no_such'"),
    ("rewrite", {"freez": "a"}, "request", "did you mean 'freeze'"),
    ("rewrite", {"level": "op"}, "request", "use ops, regions or plan"),
    ("rewrite", {"level": "ops", "budget": "2GiB"}, "request", "exclude each other"),
    ("rewrite", {"budget": "2GiB"}, "request", "A plan needs an input"),
    ("rewrite", {"budget": "3 pigs", "input": "4x3x32x32"}, "request", "3 pigs"),
    ("rewrite", {"seed": "a"}, "request", "option 'seed'"),
    ("rewrite", {"seed": object()}, "request", "type"),
    ("rewrite", {"method": "nothing"}, "request", "no method 'nothing'"),
    ("rewrite", {"device": "tpu"}, "request", "tpu"),
    ("rewrite", {"input": "2"}, "input", "forward"),
    ("profile", {}, "input", "argument"),
    ("profile", {"input": "4x3x32x32", "step": 9}, "request", "did you mean 'steps'"),
    ("plan", {"input": "4x3x32x32", "points": 1}, "request", "points"),
    ("diff", {"b": 1}, "request", "nothing"),
])
def test_errors_are_one_sentence(tsmem, function, options, kind, sentence):
    module = models.make("cnn")
    first = (module, module) if function == "diff" else (module,)
    if "b" in options:
        options = {"method": "nothing"}
    with pytest.raises(tsmem.Error, match=sentence) as error:
        getattr(tsmem, function)(*first, **options)
    assert error.value.kind == kind and "\n" not in str(error.value) and "bug" not in str(error.value), error.value


class Odd(nn.Module):
    """What a copy in memory must keep: shared weights, views, buffers that aren't saved, non-tensor attributes, unused methods, several dtypes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        flat = torch.randn(32)
        self.register_buffer("view", flat[8:24].view(4, 4).t())
        self.register_buffer("base", flat)
        self.register_buffer("temporary", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", None)
        self.names = ["x", "y"]
        self.table = {"k": torch.ones(2, dtype=torch.float64)}
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.a(x)))) + self.base.sum() + self.view[0].sum() + self.table["k"].sum().to(x.dtype)

    @torch.jit.export
    def other(self, x: int):
        return x + len(self.names)


def test_a_copy_keeps_what_a_file_keeps(tsmem, tmp_path):
    module = torch.jit.script(Odd().eval())
    module.a.weight.requires_grad_(False)
    module.drop.train()
    new = tsmem.rewrite(module)
    module.save(str(tmp_path / "m.pt"))
    loaded = torch.jit.load(str(tmp_path / "m.pt"))
    assert list(new.state_dict()) == list(loaded.state_dict())
    assert [(p.requires_grad, p.dtype) for p in new.parameters()] == [(p.requires_grad, p.dtype) for p in loaded.parameters()]
    assert [m.training for m in new.modules()] == [m.training for m in loaded.modules()]
    assert new.a.weight.data_ptr() == new.b.weight.data_ptr() and new.view.stride() == module.view.stride()
    assert new.view.untyped_storage().data_ptr() == new.base.untyped_storage().data_ptr() != module.base.untyped_storage().data_ptr()
    x = torch.randn(2, 8)
    assert torch.equal(new(x), module(x)) and new.other(3) == 5
    assert new.original_name == "Odd"


class MeantAnotherThing(nn.Module):
    """Every operator that TorchScript reads differently in a file of an older version."""

    def forward(self, x, n: int):
        whole = torch.arange(1, n)
        y = F.gelu(x, approximate="tanh") + whole.div(2) + torch.div(whole, 2) + whole / 2
        y += torch.full([n - 1], True, dtype=torch.bool).to(x.dtype)
        if torch.full([2], n).is_floating_point():
            y = y + 100
        whole_too = whole.clone().double()
        whole_too.div_(2)
        return y + torch.linspace(0.0, 1.0, n - 1) + torch.logspace(0.0, 1.0, n - 1) + whole_too


def test_a_copy_is_of_this_versions_code(tsmem):
    module = torch.jit.script(MeantAnotherThing())
    x = torch.randn(3, 8)
    torch.testing.assert_close(tsmem.rewrite(module)(x, 9), module(x, 9), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["activations", "attention", "dropouts", "containers", "custom-class", "norms"])
def test_models_in_the_process(tsmem, name):
    for how in models.kinds(name):
        assert "tsmem::" in str(tsmem.rewrite(models.make(name, how)).inlined_graph)


def test_on_the_meta_device_and_traced(tsmem):
    traced = torch.jit.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(2, 3, 8, 8))
    assert "tsmem::" in str(tsmem.rewrite(traced).inlined_graph)
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    new = tsmem.rewrite(torch.jit.script(module))
    assert all(p.is_meta for p in new.parameters()) and "tsmem::" in str(new.inlined_graph)


def test_estimates_leave_pytorchs_own_shape_functions(tsmem):
    """Shape functions for estimates hold while one is made, and no longer."""
    def shapes():
        x = torch.empty(2, 3, 8, 8, device="meta")
        return torch.nn.functional.conv2d(x, torch.empty(4, 3, 3, 3, device="meta")).stride()

    before = shapes()
    tsmem.plan(models.make("cnn"), input="4x3x32x32", points=2, estimate=True)
    assert shapes() == before
    with pytest.raises(NotImplementedError):
        torch.equal(torch.empty(2, device="meta"), torch.empty(2, device="meta"))


class KeepsAGraph(torch.nn.Module):
    """Makes its table once in eval mode, as LeViT its biases: a second backward goes through a graph that is gone."""

    table: torch.Tensor
    made: bool

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8) + 0.5)
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.table, self.made = torch.zeros(8), False

    def forward(self, x: torch.Tensor):
        if self.training:
            table = self.weight.square()
        else:
            if not self.made:
                self.table = self.weight.square()
                self.made = True
            table = self.table
        return torch.relu(self.conv(x)) * table[:, None, None]


def test_verify_of_a_model_that_runs_once_in_eval_mode(tsmem):
    original = torch.jit.script(KeepsAGraph())
    verdict = tsmem.verify(original, tsmem.rewrite(original), input="2x3x12x12", thorough=True)
    assert verdict["equal"], verdict
    assert any("From call 2 on nothing was compared in eval mode, where both models raise: Trying to backward" in note for note in verdict["notes"]), verdict["notes"]
