"""torch.func over the ops: PyTorch's own operators run under vmap, and second derivatives of activations are PyTorch's."""
import pytest
import torch
from torch import nn

from op_checks import assert_equal


def test_every_op_has_a_batching_rule(ops):
    """The rule runs the op's own body, which computes with PyTorch's operators."""
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("tsmem::")
        tensors = any("Tensor" in str(a.type) for a in schema.arguments)
        if name != schema.name and not name.startswith("_act") and tensors and (not name.startswith("_") or name in ("_convolution", "_convolution_mode", "_grouped_mm")):
            full = schema.name + ("." + schema.overload_name if schema.overload_name else "")
            assert any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in ("FuncTorchBatched", "FuncTorchDynamicLayerFrontMode")), full


BN = (None, None, None, None, True, 0.1, 1e-5, True)
CASES = {
    "batch_norm_act": (lambda o, x: o.batch_norm_act(x, *BN, "relu", []), lambda x: torch.batch_norm(x, *BN).relu()),
    "group_norm_act": (lambda o, x: o.group_norm_act(x, 3, None, None, 1e-5, True, "relu", []), lambda x: nn.functional.group_norm(x, 3).relu()),
    "instance_norm_act": (lambda o, x: o.instance_norm_act(x, *BN, "relu", []), lambda x: torch.instance_norm(x, *BN).relu()),
    "cat": (lambda o, x: o.cat([x, x], 1, 1), lambda x: torch.cat([x, x], 1)),
    "conv_batch_norm_act": (
        lambda o, x: o.conv_batch_norm_act(x, torch.ones(2, 3, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *BN, "relu", [], False),
        lambda x: torch.batch_norm(torch.conv2d(x, torch.ones(2, 3, 1, 1)), *BN).relu(),
    ),
    "mul": (lambda o, x: o.mul(x, x, 1), lambda x: x * x),
    "act": (lambda o, x: o.act(x, "silu", [], 1), nn.functional.silu),
    "softmax": (lambda o, x: o.softmax(x, 1), lambda x: x.softmax(1)),
}


@pytest.mark.parametrize("name", CASES)
def test_vmap(ops, name):
    ours, pytorch = CASES[name]
    x = torch.randn(3, 2, 3, 4, 4)
    assert_equal([torch.func.vmap(lambda t: ours(ops, t))(x)], [torch.func.vmap(pytorch)(x)], layout=False)
    g = [torch.func.vmap(torch.func.grad(lambda t, f=f: f(t).sin().sum()))(x) for f in (lambda t: ours(ops, t), pytorch)]
    torch.testing.assert_close(*g)


@pytest.mark.parametrize("outside", [False, True], ids=["of a sample", "of a tensor from outside"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
def test_randomness(ops, name, grad, outside):
    """An error by default; else one draw for all samples or one for each, as PyTorch's own draw."""
    x = torch.randn(4, 3, 5, 6, requires_grad=grad)
    whole = torch.randn(3, 5, 6, requires_grad=grad)

    def called(source):
        return lambda t: getattr(source, name)(whole if outside else t, 0.5, True) * t

    for source in (torch.ops.aten, ops):
        with pytest.raises(RuntimeError, match="randomness error mode"):
            torch.func.vmap(called(source))(x)
    for randomness in ("same", "different"):
        drawn = []
        for source in (torch.ops.aten, ops):
            torch.manual_seed(0)
            drawn.append(torch.func.vmap(called(source), randomness=randomness)(x))
        torch.testing.assert_close(*drawn, rtol=0, atol=0)
        if grad:
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in drawn), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_second_derivatives(ops, name):
    x = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: ops.act(t, name, [], 1), x)
    first = [torch.autograd.grad(f(x).sum(), x, create_graph=True)[0] for f in (lambda t: ops.act(t, name, [], 1), getattr(nn.functional, name))]
    torch.testing.assert_close(*(torch.autograd.grad(g.sum(), x)[0] for g in first))
