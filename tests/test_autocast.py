"""A caller's torch.autocast around a rewritten model: the dtypes of the original, at every call."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conftest
import tsmem
from command_line import run
from op_checks import live_bytes

conftest.load()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.transposed, self.linear = nn.ConvTranspose2d(4, 4, 3, padding=1), nn.Linear(8, 8)
        self.layer, self.group, self.instance = nn.LayerNorm(8), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)


class Convolution(Layers):
    def forward(self, x):
        return self.conv(x)


class Transposed(Layers):
    def forward(self, x):
        return self.transposed(x)


class Linear(Layers):
    def forward(self, x):
        return F.dropout(self.linear(x), 0.0)


class Sum(Layers):
    def forward(self, x):
        return F.relu(self.conv(x)) + F.relu(self.conv(x * 2))


class SumInPlace(Layers):
    def forward(self, x):
        y = F.silu(self.conv(x))
        y += F.relu(self.conv(x * 2))
        return y


class SumWithFloat(Layers):
    def forward(self, x):
        return F.relu(self.conv(x)) + F.relu(x)


class FloatIntoHalf(Layers):
    def forward(self, x):
        y = F.silu(self.conv(x))
        y += F.relu(x)
        y *= torch.sigmoid(x)
        return y


class Product(Layers):
    def forward(self, x):
        y = F.silu(self.conv(x))
        return y * torch.sigmoid(self.conv(x))


class SqueezeExcite(Layers):
    def forward(self, x):
        y = F.silu(self.norm(self.conv(x)))
        return y * torch.sigmoid(F.adaptive_avg_pool2d(y, 1))


class Residual(Layers):
    def forward(self, x):
        y = self.conv(x)
        return F.relu(self.norm(self.conv(y)) + y)


class ResidualInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        z = self.norm(self.conv(y))
        z += y
        return F.relu(z)


class NormThenGelu(Layers):
    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))


class NormThenRelu(Layers):
    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


class LayerNorm(Layers):
    def forward(self, x):
        return self.layer(self.conv(x))


class GroupNorm(Layers):
    def forward(self, x):
        return F.silu(self.group(self.conv(x)))


class InstanceNorm(Layers):
    def forward(self, x):
        return F.relu(self.instance(self.conv(x)))


class Softplus(Layers):
    def forward(self, x):
        return F.softplus(self.conv(x)) * 2


class Products(Layers):
    def forward(self, x):
        y = self.linear(x)
        return torch.softmax(torch.matmul(y, x.transpose(2, 3)), -1) @ x


class SpelledOut(Layers):
    def forward(self, x):
        y = self.conv(x)
        return y * torch.sigmoid(y)


class SpelledOutInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        y *= torch.sigmoid(y)
        return y


class SpelledOutGelu(Layers):
    def forward(self, x):
        y = self.conv(x)
        return y * 0.5 * (torch.erf(y / 1.4142135623730951) + 1)


class SpelledOutGeluInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        return y.mul(0.5).mul_(torch.erf(y / 1.4142135623730951) + 1)


class SpelledOutHardswish(Layers):
    def forward(self, x):
        y = self.conv(x)
        return (y * F.relu6(y + 3)).mul_(0.16666666666666666)


class SpelledOutHardswishOfASixth(Layers):
    def forward(self, x):
        y = self.conv(x)
        return (y / 6).mul_(F.relu6(y + 3))


class SpelledOutHardswishInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        y *= F.relu6(y + 3)
        return y / 6


class SpelledOutMishInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        y *= torch.tanh(F.softplus(y))
        return y


class SpelledOutGeluHalvedInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        return (y * (torch.erf(y / 1.4142135623730951) + 1)).mul_(0.5)


class SpelledOutSiluOfTheOther(Layers):
    def forward(self, x):
        y = self.conv(x)
        return torch.sigmoid(y).mul_(y)


class SpelledOutMishOfTheOther(Layers):
    def forward(self, x):
        y = self.conv(x)
        return torch.tanh(F.softplus(y)).mul_(y)


class SpelledOutHardswishAllInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        return y.mul_(F.relu6(y + 3)).div_(6)


class SpelledOutGeluAllInPlace(Layers):
    def forward(self, x):
        y = self.conv(x)
        t = torch.erf(y / 1.4142135623730951) + 1
        return y.mul_(0.5).mul_(t)


OVERWRITE_WHAT_BACKWARD_NEEDS = {"SpelledOutSiluOfTheOther", "SpelledOutMishOfTheOther"}
SPELLED_OUT = [SpelledOutSiluOfTheOther, SpelledOutMishOfTheOther, SpelledOutHardswishAllInPlace, SpelledOutGeluAllInPlace, SpelledOut, SpelledOutInPlace, SpelledOutHardswish, SpelledOutHardswishOfASixth, SpelledOutHardswishInPlace, SpelledOutMishInPlace, SpelledOutGelu, SpelledOutGeluInPlace, SpelledOutGeluHalvedInPlace]
PROGRAMS = [*SPELLED_OUT, Convolution, Transposed, Linear, Sum, SumInPlace, SumWithFloat, FloatIntoHalf, Product, SqueezeExcite, Residual, ResidualInPlace,
            NormThenGelu, NormThenRelu, LayerNorm, GroupNorm, InstanceNorm, Softplus, Products]


class Programs(nn.Module):
    def __init__(self):
        super().__init__()
        for program in PROGRAMS:
            self.add_module(program.__name__, program())

    def forward(self, x):
        return [getattr(self, "Convolution")(x)]


@pytest.fixture(scope="module", params=["script", "trace"])
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("autocast")
    torch.manual_seed(0)
    programs = Programs()
    if request.param == "trace":
        for name, child in list(programs.named_children()):
            programs.add_module(name, torch.jit.trace(child, torch.randn(2, 4, 8, 8), check_trace=False))
    torch.jit.script(programs).save(str(folder / "original.pt"))
    for level in ("regions", "ops"):
        done = run("rewrite", folder / "original.pt", "-o", folder / f"{level}.pt", "--level", level)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("level", ["regions", "ops"])
def test_dtypes_of_the_original(files, level):
    pytorch, ours, exact = (torch.jit.load(str(files / f"{name}.pt")) for name in ("original", level, "original"))
    exact.double()
    wrong = []
    for program in [p.__name__ for p in PROGRAMS]:
        a, b, c = (getattr(m, program) for m in (pytorch, ours, exact))
        for call in range(4):
            torch.manual_seed(call)
            x = torch.randn(2, 4, 8, 8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y, z = a(x), b(x)
            if y.dtype != z.dtype:
                wrong.append(f"{program}, call {call + 1}: {z.dtype} in place of {y.dtype}")
                continue
            true = c(x.double())
            error, allowed = (z.double() - true).norm(), (y.double() - true).norm()
            assert error <= 2 * allowed + 1e-3 * true.norm(), program
            if program in OVERWRITE_WHAT_BACKWARD_NEEDS:
                continue
            for m, out in ((a, y), (b, z)):
                m.zero_grad()
                out.float().square().sum().backward()
            assert all((p.grad is None) == (q.grad is None) and (p.grad is None or p.grad.dtype == q.grad.dtype) for p, q in zip(a.parameters(), b.parameters()))
    assert not wrong, wrong


class Nested(Layers):
    """TorchScript inserts its casts in the whole outer block."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.tanh(x * 2)
            return F.relu(self.norm(self.conv(y)))


class UnusedNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.nested = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), Nested()

    def forward(self, x):
        y = self.conv(x)
        unused = self.nested(y)
        return F.relu(self.norm(y))


@pytest.mark.parametrize("level", ["regions", "ops"])
def test_nested_blocks_of_the_models_own(level, tmp_path):
    torch.manual_seed(0)
    torch.jit.script(UnusedNested().bfloat16()).save(str(tmp_path / "original.pt"))
    done = run("rewrite", tmp_path / "original.pt", "-o", tmp_path / "rewritten.pt", "--level", level)
    assert done.returncode == 0, done.stderr
    pytorch, ours = (torch.jit.load(str(tmp_path / f"{name}.pt")) for name in ("original", "rewritten"))
    assert "tsmem" in ours.code and "tsmem" not in ours.nested.code + ours.nested.conv.code + ours.nested.norm.code
    for call in range(4):
        x = torch.randn(2, 4, 8, 8, dtype=torch.bfloat16)
        results = []
        for m in (pytorch, ours):
            m.zero_grad()
            y = m(x)
            y.sum().backward()
            results.append((y, [name for name, p in m.named_parameters() if p.grad is not None]))
        (a, given), (b, ours_given) = results
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)
        assert given == ours_given


class Encoder(nn.Module):
    """One layer of a transformer: norms, which autocast runs in float32 or leaves alone, between layers that it runs in half."""

    def __init__(self, width=128):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


def under_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


@pytest.mark.parametrize("door", ["torch.compile", "file", "amp"])
def test_casts_are_made_again(door):
    """What a norm gives is cast for each layer behind it, and a half one for the norm: neither copy is kept. Saved bytes, and the distance from float64."""
    torch.manual_seed(0)
    eager, x = nn.Sequential(Encoder(), Encoder()), torch.randn(4, 64, 128)
    model = {
        "torch.compile": lambda: torch.compile(copy.deepcopy(eager), backend="tsmem", options={"strict": True}),
        "file": lambda: tsmem.rewrite(torch.jit.script(copy.deepcopy(eager))),
        "amp": lambda: tsmem.rewrite(torch.jit.script(copy.deepcopy(eager)), amp="bf16"),
    }[door]()
    call = (lambda x: model(x)) if door == "amp" else (lambda x: under_autocast(model, x))

    def gradients(f, parameters, x):
        out = f(x)
        return torch.autograd.grad(out, list(parameters), torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype))

    exact = copy.deepcopy(eager).double()
    reference = gradients(exact, exact.parameters(), x.double())

    def error(found):
        return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, reference))

    theirs = error(gradients(lambda x: under_autocast(eager, x), eager.parameters(), x))
    for _ in range(3):
        assert error(gradients(call, model.parameters(), x)) <= 2 * theirs
    own = live_bytes(lambda: under_autocast(eager, x))
    assert live_bytes(lambda: call(x)) <= 0.51 * own


@pytest.mark.parametrize("door", ["torch.compile", "file"])
@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_backward_has_the_cast_with_which_forward_ran(door, calls):
    """A weight that is overwritten within an autocast block, whose cache may go on with the old cast."""
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        layer[0].weight.uniform_()
    model = torch.compile(layer, backend="tsmem", options={"strict": True}) if door == "torch.compile" else tsmem.rewrite(torch.jit.script(layer))
    (weight,) = model.parameters()
    x = torch.ones(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        graphs = [model(x) for _ in range(calls)]
        with torch.no_grad():
            weight.mul_(3)
        out = model(x).float()
    (found,) = torch.autograd.grad(out.sum(), x)
    # The sum of the weights that forward had, from either.
    assert abs(found[0].sum() - out[0].sum()) <= 0.02 * out[0].sum()
    del graphs
