"""What happens between a forward and its backward, or in code that a method's own view does not show: another method, another task, the caller."""
from typing import List

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conftest
from command_line import run

conftest.load()


class Observed(nn.Module):
    """A method of its own overwrites what forward has read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("middle", torch.randn(4, 1, 1))
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(F.silu(x - self.middle))

    @torch.jit.export
    def observe(self, x):
        self.middle.view(-1).add_(0.1 * (x.mean([0, 2, 3]) - self.middle.view(-1)))


class ObservedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Observed()

    def forward(self, x):
        return self.inner(x)

    @torch.jit.export
    def observe(self, x):
        self.inner.observe(x)


@torch.jit.interface
class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


class OverwritesBehindAnInterface(nn.Module):
    block: Block

    def __init__(self):
        super().__init__()
        self.block, self.conv = Halves(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = x - 1.0
        u = self.conv(torch.cat([y[:, :2], y[:, 2:]], 1))
        return u + self.block(y)


def halve(x: Tensor):
    return x.mul_(0.5)


def double(x: Tensor):
    return x * 2


class OverwritesInATask(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = x - 1.0
        u = self.conv(torch.cat([y[:, :2], y[:, 2:]], 1))
        task = torch.jit.fork(halve, y)
        return u + torch.jit.wait(task)


class TaskBetweenNormAndActivation(nn.Module):
    """The task overwrites the norm's input before the activation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4).eval().requires_grad_(False)

    def forward(self, x):
        y = x.detach() * 1.0
        u = self.norm(y)
        task = torch.jit.fork(halve, y)
        z = torch.jit.wait(task)
        return F.relu(u) * x + z


class OneAttributeForAnother(nn.Module):
    """Another method makes two attributes one tensor."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4).eval().requires_grad_(False)
        self.register_buffer("state", torch.randn(2, 4, 8, 8))
        self.register_buffer("other", torch.randn(2, 4, 8, 8))

    @torch.jit.export
    def observe(self, x):
        self.state = self.other

    def forward(self, x):
        u = self.norm(self.state)
        self.other.add_(1.0)
        return F.relu(u) * x


class Inner(nn.Module):
    """What a checkpoint runs again depends on more than tensors."""

    memory: List[Tensor]

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.scale = 1.0
        self.register_buffer("gain", torch.ones(4, 1, 1))
        self.memory = [torch.ones(4, 1, 1, dtype=torch.float64)]

    def forward(self, x):
        return F.relu(self.dropout(self.norm(self.conv(x))) * self.scale + self.memory[0] - 1.0) * self.gain


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.conv = Inner(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(self.inner(x))


class ChangesANumber(Outer):
    def forward(self, x):
        self.inner.scale = 1.0
        y = self.inner(x)
        self.inner.scale = 3.0
        return self.conv(y) + self.inner(y)


class ReplacesABuffer(Outer):
    def forward(self, x):
        y = self.conv(self.inner(x))
        self.inner.gain = y.detach().mean([0, 2, 3]).view(4, 1, 1)
        return y


class ReplacesAnElement(Outer):
    def forward(self, x):
        y = self.conv(self.inner(x))
        self.inner.memory[0] = y.detach().mean([0, 2, 3]).view(4, 1, 1)
        return y


class OverwritesAnElement(Outer):
    def forward(self, x):
        y = self.conv(self.inner(x))
        self.inner.memory[0].sub_(1.0)
        return y


def backward(out):
    (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()


def plain(model, x):
    out = model(x)
    backward(out)
    return [out]


def observing(model, x):
    out = model(x)
    model.observe(x.detach())
    backward(out)
    return [out]


def first_observing(model, x):
    model.observe(x.detach())
    return plain(model, x)


def switching(model, x, training):
    model.train(training)
    out = model(x)
    model.train(not training)
    backward(out)
    return [out]


def evaluating(model, x):
    return switching(model, x, True)


def training_again(model, x):
    return switching(model, x, False)


def replacing_a_parameter(model, x):
    bias = model.inner.norm.bias
    out = model(x)
    model.inner.norm.bias = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    backward(out)
    model.inner.norm.bias = bias
    return [out, bias.grad]


CHECKPOINT = ["--checkpoint", "inner"]
CASES = [
    *((program, step, options) for program, step in ((Observed, observing), (ObservedInside, observing), (OverwritesBehindAnInterface, plain), (OverwritesInATask, plain), (TaskBetweenNormAndActivation, plain), (OneAttributeForAnother, first_observing))
      for options in ([], ["--level", "ops"])),
    *((Outer, step, CHECKPOINT) for step in (plain, evaluating, training_again, replacing_a_parameter)),
    *((program, plain, CHECKPOINT) for program in (ChangesANumber, ReplacesABuffer, ReplacesAnElement, OverwritesAnElement)),
]


@pytest.mark.parametrize("program, step, options", CASES, ids=lambda v: v.__name__ if callable(v) else "".join(v[:2][-1:]) or "regions")
def test_same_numbers(program, step, options, tmp_path):
    torch.manual_seed(0)
    torch.jit.script(program().double()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", *options)
    assert done.returncode == 0, done.stderr
    if options == CHECKPOINT:
        assert "ops.tsmem.checkpoint" in torch.jit.load(str(tmp_path / "rewritten.pt")).code
    results = []
    for name in ("original.pt", "rewritten.pt"):
        model = torch.jit.load(str(tmp_path / name))
        found = []
        for call in range(4):
            torch.manual_seed(call)
            x = torch.randn(2, 4, 8, 8, dtype=torch.float64, requires_grad=True)
            model.zero_grad()
            found += [*step(model, x), x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers()), torch.get_rng_state()]
        results.append(found)
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-9, atol=1e-9)


class Forces(nn.Module):
    """Its own code takes a gradient that training differentiates further."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 8))

    def forward(self, x):
        x.requires_grad_(True)
        energy = F.cross_entropy(self.layers(x).view(-1, 8), torch.arange(64, device=x.device) % 8)
        force = torch.autograd.grad([energy], [x], create_graph=True)[0]
        assert force is not None
        return -force * energy


@pytest.mark.parametrize("options", [[], ["--level", "ops"]])
def test_a_model_that_differentiates_itself(options, tmp_path):
    """Whatever has second derivatives is rewritten, and what has none is not."""
    torch.manual_seed(0)
    torch.jit.script(Forces().double()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", "--explain", *options)
    assert done.returncode == 0, done.stderr
    assert options or "torch.autograd.grad with create_graph" in done.stdout
    code = str(torch.jit.load(str(tmp_path / "rewritten.pt")).inlined_graph)
    assert "linear_cross_entropy" not in code and (options or "tsmem::linear(" in code and "tsmem::act(" in code)
    results = []
    for name in ("original.pt", "rewritten.pt"):
        model = torch.jit.load(str(tmp_path / name))
        torch.manual_seed(1)
        for _ in range(3):
            backward(model(torch.randn(2, 4, 8, 8, dtype=torch.float64)))
        results.append([p.grad for p in model.parameters()])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-9, atol=1e-9)


class TaskThatOnlyReads(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        task = torch.jit.fork(double, x)
        y = self.last(F.relu(self.norm(self.conv(x))))
        return y + torch.jit.wait(task)


def test_a_task_beside_a_match_stands_in_no_way(tmp_path):
    torch.jit.script(TaskThatOnlyReads()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt")
    assert done.returncode == 0, done.stderr
    assert "tsmem::batch_norm_act" in str(torch.jit.load(str(tmp_path / "rewritten.pt")).inlined_graph)
