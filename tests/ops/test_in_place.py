"""What overwrites a tensor in the original and no longer does: sizes, dtype and errors are the in-place operator's, whatever the operands are."""
import pytest
import torch
from torch import nn

from command_line import run as tsmem
from op_checks import run

BN = (None, None, None, None, True, 0.1, 1e-5, True)


def tensor(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64) * 3
    return x.to(dtype).requires_grad_(dtype.is_floating_point)


def outcome(f, *inputs):
    """[output, gradients], or the sentence of the exception."""
    try:
        return run(f, *inputs)
    except RuntimeError as error:
        return str(error).splitlines()[0]


def assert_same(ours, pytorch, what):
    assert type(ours) is type(pytorch), (what, ours, pytorch)
    if isinstance(pytorch, str):
        assert ours == pytorch, what
        return
    for a, b in zip(ours, pytorch, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, what
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")


F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
PAIRS = [(a, b, s, t) for a, b in ((F32, F32), (F32, F64), (F64, F32), (BF16, F32), (F32, I64), (I64, F32), (I64, I64))
         for s, t in (((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 1)), ((3, 1), (2, 3, 4)), ((2, 3, 4), ()), ((), (2, 3, 4)), ((0, 3), (1, 3)), ((2, 3), (2, 4)))]


@pytest.mark.parametrize("recompute", [0, 1])
def test_add_and_mul(ops, recompute):
    for a, b, s, t in PAIRS:
        x, y = tensor(a, s), tensor(b, t)
        assert_same(outcome(lambda x, y: ops.add(x, y, 1, recompute, 1), x, y), outcome(lambda x, y: x.clone().add_(y), x, y), ("add_", a, b, s, t))
        assert_same(outcome(lambda x, y: ops.mul(x, y, recompute, 1), x, y), outcome(lambda x, y: x.clone().mul_(y), x, y), ("mul_", a, b, s, t))


def test_products_and_norms(ops):
    for a, b, s, t in PAIRS:
        if not a.is_floating_point or a == I64 or len(s) != 3 or 0 in s:
            continue
        x, y = tensor(a, s), tensor(b, t)
        norm = lambda x: torch.ops.aten.batch_norm(x, *BN)
        silu = torch.nn.functional.silu
        for onto, ours, pytorch in (
            (False, ops.mul_act, lambda x, y: silu(x).mul_(y)),
            (True, ops.mul_act, lambda x, y: y.clone().mul_(silu(x))),
        ):
            assert_same(outcome(lambda x, y: ours(silu(x), y, x, "silu", [], 0, 2 if onto else 1), x, y), outcome(pytorch, x, y), ("mul_act", onto, a, b, s, t))
        for onto, pytorch in ((False, lambda x, y: norm(x).add_(y).relu()), (True, lambda x, y: y.clone().add_(norm(x)).relu())):
            assert_same(outcome(lambda x, y: ops.batch_norm_add_act(x, *BN, y, "relu", [], 0, 2 if onto else 1), x, y), outcome(pytorch, x, y), ("bn_add_act", onto, a, b, s, t))


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu"])
def test_integers(ops, name):
    x = tensor(I64, (2, 3))
    assert_same(outcome(lambda x: ops.act(x, name, []), x), outcome(lambda x: getattr(x.clone(), name + "_")(), x), name)


class AddInPlace(nn.Module):
    def forward(self, x, y):
        z = x * x
        z += y
        return torch.relu(z)


class MulInPlace(nn.Module):
    def forward(self, x, y):
        z = torch.nn.functional.silu(x)
        z *= y
        return torch.sigmoid(z)


class Residual(nn.Module):
    def __init__(self, onto_other: bool):
        super().__init__()
        self.bn, self.onto_other = nn.BatchNorm1d(3, affine=False), onto_other

    def forward(self, x, y):
        z, r = self.bn(x), y * 1
        if self.onto_other:
            r += z
            return torch.relu(r)
        z += r
        return torch.relu(z)


class Holder(nn.Module):
    """Modules that are called on their own, rewritten by one run of the tool."""

    def __init__(self):
        super().__init__()
        self.add, self.mul, self.onto_norm, self.onto_other = AddInPlace(), MulInPlace(), Residual(False), Residual(True)

    def forward(self, x):
        return x


@pytest.mark.parametrize("level", ["ops", "regions"])
def test_rewritten(ops, tmp_path, level):
    torch.jit.script(Holder()).save(tmp_path / "pytorch.pt")
    done = tsmem("rewrite", tmp_path / "pytorch.pt", "-o", tmp_path / "ours.pt", "--level", level)
    assert done.returncode == 0, done.stderr
    for name in ("add", "mul", "onto_norm", "onto_other"):
        pytorch, ours = (getattr(torch.jit.load(tmp_path / file), name) for file in ("pytorch.pt", "ours.pt"))
        assert level == "ops" and name in ("add", "mul") or "tsmem::" in str(ours.inlined_graph), name
        for a, b, s, t in PAIRS:
            if a == I64 or len(s) != 3 or 0 in s:
                continue
            x, y = tensor(a, s), tensor(b, t)
            ours_out, pytorch_out = outcome(ours, x, y), outcome(pytorch, x, y)
            if isinstance(pytorch_out, str):  # TorchScript's sentences begin with where
                assert isinstance(ours_out, str), (name, a, b, s, t)
            else:
                assert_same(ours_out, pytorch_out, (name, level, a, b, s, t))


def test_strides_are_those_of_the_operand_that_the_original_names_first(ops):
    x, y = tensor(F32, (2, 3, 4, 5)), tensor(F32, (2, 3, 4, 5))
    silu, norm = torch.nn.functional.silu, lambda x: torch.ops.aten.batch_norm(x, *BN)
    for formats in [(a, b) for a in (torch.contiguous_format, torch.channels_last) for b in (torch.contiguous_format, torch.channels_last)]:
        a, b = (t.detach().contiguous(memory_format=f).requires_grad_() for t, f in zip((x, y), formats))
        for recompute in (0, 1):
            for ours, pytorch in (
                (lambda a, b: ops.mul_act(silu(a), b, a, "silu", [], recompute, 0), lambda a, b: silu(a) * b),
                (lambda a, b: ops.mul_act(silu(a), b, a, "silu", [], recompute, 3), lambda a, b: b * silu(a)),
                (lambda a, b: ops.mul_act(silu(a), b.clone(), a, "silu", [], recompute, 2), lambda a, b: b.clone().mul_(silu(a))),
                (lambda a, b: ops.batch_norm_add_act(a, *BN, b, "silu", [], recompute, 0), lambda a, b: silu(norm(a) + b)),
                (lambda a, b: ops.batch_norm_add_act(a, *BN, b, "silu", [], recompute, 3), lambda a, b: silu(b + norm(a))),
            ):
                assert ours(a, b).stride() == pytorch(a, b).stride(), formats
                assert_same(outcome(ours, a, b), outcome(pytorch, a, b), formats)


def test_strides():
    """A tensor that is overwritten keeps its strides, also where a dimension has one element and a new result's would be others."""
    ops = torch.ops.tsmem
    silu = torch.nn.functional.silu
    sizes = ((2, 4, 1, 1), (4, 1, 4, 4)), ((2, 4, 2, 1), (8, 1, 4, 4)), ((2, 1, 2, 2), (4, 1, 2, 1)), ((2, 4, 1), (4, 1, 17)), ((1, 4, 3, 3), (99, 1, 12, 4)), ((2, 4, 3, 3), (36, 1, 12, 4))
    for size, stride in sizes:
        for grad in (False, True):
            odd = [torch.randn(72).as_strided(size, stride).requires_grad_(grad) for _ in range(2)]
            for a, b in (odd, (odd[0], torch.randn(size).requires_grad_(grad)), (torch.randn(size).requires_grad_(grad), odd[0])):
                for recompute in (0, 1):
                    assert ops.add(a, b, 1, recompute).stride() == (a + b).stride()
                    assert ops.mul(a, b, recompute).stride() == (a * b).stride()
                    assert ops.add(a, b, 1, recompute, 3).stride() == (b + a).stride()
                    assert ops.mul(a, b, recompute, 3).stride() == (b * a).stride()
                    for in_place, target in ((1, a), (2, b)):
                        assert ops.add(a, b, 1, recompute, in_place).stride() == target.stride()
                        assert ops.mul(a, b, recompute, in_place).stride() == target.stride()
                z = silu(a)
                for in_place, stride in ((0, (z * b).stride()), (1, z.stride()), (2, b.stride()), (3, (b * z).stride())):
                    assert ops.mul_act(silu(a), b, a, "silu", [], 0, in_place).stride() == stride
    gaps = torch.randn(2, 4, 6)[..., ::2].detach().requires_grad_()  # whatever it is a part of has no other user
    for out in (ops.act(gaps, "relu", [], 0, True), ops.add(gaps, gaps, 1, 0, 1)):
        assert out.stride() == gaps.stride()
        assert out.backward(torch.ones_like(out)) is None


def test_recomputed_in_the_same_strides():
    """What is recomputed is viewed as the output was, though its operands would give other strides where a dimension has one element."""
    ops = torch.ops.tsmem
    conv = torch.nn.Conv2d(2048, 2048, 1, groups=64).to(memory_format=torch.channels_last)
    for in_place in (0, 1):
        grads = []
        for recompute in (0, 1):
            x = torch.linspace(-2, 2, 4 * 2048).view(4, 2048, 1, 1).contiguous(memory_format=torch.channels_last).requires_grad_()
            y = ops.act(ops.add(conv(x), x, 1, recompute, in_place), "relu", [], recompute, bool(in_place))
            y = ops.add(ops.mul(y, y, recompute), y, 1, recompute)
            z = ops.linear(y.permute(0, 2, 3, 1)[:, 0], torch.linspace(0, 1, 2 * 2048).view(2, 2048).requires_grad_())
            grads.append(torch.autograd.grad(z.square().sum(), [x, *conv.parameters()]))
        for a, b in zip(*grads):
            assert torch.equal(a, b)
