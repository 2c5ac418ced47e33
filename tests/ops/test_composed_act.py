"""Activations spelled out in other operators, as one op: against the formulas, and what is kept."""
import math

import pytest
import torch
from op_checks import DTYPES, calls, run, saved
from torch import nn

F = nn.functional
FORMULAS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "hardswish": lambda x: x * F.relu6(x + 3) / 6,
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    "gelu_tanh_pow": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
}


def ours(name, again=1):
    return lambda x: torch.ops.tsmem.composed_act(x, name, again)


@pytest.mark.parametrize("again", [-1, 0, 1])
@pytest.mark.parametrize("name", FORMULAS)
def test_equals_the_formula(ops, name, again):
    """float64 to 1e-9; 16 bits no further from float64 than the formula is, float32 at most twice as far (PyTorch's gelu is)."""
    x = torch.cat([torch.linspace(-12, 12, 4001, dtype=torch.float64), torch.tensor([-3.0, 0.0, 3.0, 100.0, -100.0])])
    want = run(FORMULAS[name], x.requires_grad_())
    for got, right in zip(run(ours(name, again), x), want, strict=True):
        assert (got - right).abs().max() < 1e-9
    for dtype in DTYPES[1:]:
        y = x.detach()[:4001].to(dtype).requires_grad_()
        exact = run(FORMULAS[name], y.detach().double().requires_grad_(), cotangent=torch.ones(4001, dtype=torch.float64))
        got, pytorch = (run(f, y, cotangent=torch.ones(4001, dtype=dtype)) for f in (ours(name, again), FORMULAS[name]))
        for g, s, e in zip(got, pytorch, exact, strict=True):
            assert g.dtype == s.dtype and g.stride() == s.stride()
            error, theirs = ((t.double() - e).norm() for t in (g, s))
            assert error <= theirs * (2 if dtype == torch.float32 else 1.01) + torch.finfo(dtype).eps * e.norm() * 0.05, (dtype, error, theirs)


@pytest.mark.parametrize("name", FORMULAS)
def test_borders(ops, name):
    for value in (math.inf, -math.inf, math.nan, 0.0, -3.0, 3.0):
        x = torch.full((2,), value, dtype=torch.float64)
        torch.testing.assert_close(ours(name)(x), FORMULAS[name](x), equal_nan=True)


@pytest.mark.parametrize("name", FORMULAS)
def test_layouts_and_what_is_kept(ops, name):
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    for t in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(1, 3), x[:, ::2], x[:0]):
        t = t.detach().requires_grad_()
        got, want = run(ours(name), t), run(FORMULAS[name], t)
        assert got[0].stride() == want[0].stride() or not t.numel()
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)
    t = x.requires_grad_()
    kept, _ = saved(lambda: ours(name)(t))
    assert [k.data_ptr() for k in kept] == [t.data_ptr()]
    assert not ours(name)(x.detach()).requires_grad


@pytest.mark.parametrize("name", FORMULAS)
def test_derivatives(ops, name):
    x = (torch.randn(20, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(ours(name), x)
    assert torch.autograd.gradgradcheck(ours(name, 0), x)


@pytest.mark.parametrize("name", FORMULAS)
def test_integers_and_complex_numbers_are_the_formulas(ops, name):
    x = torch.arange(-4, 5)
    if name != "mish":  # PyTorch's softplus takes none
        torch.testing.assert_close(ours(name)(x), FORMULAS[name](x))
    if name in ("gelu_tanh", "silu"):
        z = torch.randn(5, dtype=torch.complex64)
        torch.testing.assert_close(ours(name)(z), FORMULAS[name](z))
    with pytest.raises(ValueError, match="no formula"):
        ours("swish")(x)


@pytest.mark.parametrize("name", FORMULAS)
def test_vmap_and_forward_mode(ops, name):
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(ours(name))(x), FORMULAS[name](x))
    for got, want in zip(*(torch.func.jvp(f, (x,), (x,)) for f in (ours(name), FORMULAS[name])), strict=True):
        torch.testing.assert_close(got, want)


SPELLED = {
    "silu": "x * torch.sigmoid(x)",
    "gelu": "x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))",
    "gelu_tanh": "0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))",
    "gelu_tanh_pow": "0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))",
}


@pytest.mark.parametrize("name", SPELLED)
def test_scripted_and_autocast(ops, name):
    def unit(text):
        return torch.jit.CompilationUnit(f"def f(x):\n    x = x * 1\n    return ({text}) * 1\n").f

    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    pytorch, own = unit(SPELLED[name]), unit(f'torch.ops.tsmem.composed_act(x, "{name}", 1)')
    for got, want in zip(calls(own, x), calls(pytorch, x), strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)
    for y in (x.detach().float().requires_grad_(), x.detach().bfloat16().requires_grad_()):
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got, want = run(own, y), run(pytorch, y)
            for g, w in zip(got, want, strict=True):
                assert g.dtype == w.dtype
                torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = run(ours(name), y), run(FORMULAS[name], y)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)
