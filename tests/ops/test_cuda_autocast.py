"""Under CUDA's autocast, on fake tensors (no device is needed): each operator's result has the dtype, sizes and strides of PyTorch's own."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ops, aten = torch.ops.tsmem, torch.ops.aten
SCALES = {3: [2.0], 4: [2.0, 2.0], 5: [2.0, 2.0, 2.0]}


def tensor(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def result_of(f):
    try:
        out = f()
    except RuntimeError as error:  # two half dtypes and autocast to one of them
        return str(error)
    return out.dtype, tuple(out.shape), out.stride()


# (ours, PyTorch's) of a map x, [2, 8, 6, 6], and one of the other dtype, y.
CASES = {
    **{name: (lambda x, y, n=name: getattr(ops, n)(x, 1), lambda x, y, n=name: getattr(aten, n).default(x)) for name in (
        "abs", "neg", "sqrt", "rsqrt", "square", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "atan", "sinc", "erf", "erfc", "tan", "sinh",
        "cosh", "sigmoid", "tanh", "log_sigmoid")},
    **{name: (lambda x, y, n=name: getattr(ops, n).vec(x, None, SCALES[4], 1), lambda x, y, n=name: getattr(aten, n).vec(x, None, SCALES[4])) for name in ("upsample_nearest2d",)},
    **{name: (lambda x, y, n=name: getattr(ops, n).vec(x, None, False, SCALES[4], 1), lambda x, y, n=name: getattr(aten, n).vec(x, None, False, SCALES[4])) for name in ("upsample_bilinear2d", "upsample_bicubic2d")},
    "upsample_nearest1d": (lambda x, y: ops.upsample_nearest1d.vec(x.flatten(2), None, [2.0], 1), lambda x, y: aten.upsample_nearest1d.vec(x.flatten(2), None, [2.0])),
    "upsample_linear1d": (lambda x, y: ops.upsample_linear1d.vec(x.flatten(2), None, False, [2.0], 1), lambda x, y: aten.upsample_linear1d.vec(x.flatten(2), None, False, [2.0])),
    "upsample_nearest3d": (lambda x, y: ops.upsample_nearest3d.vec(x.unsqueeze(2), None, SCALES[5], 1), lambda x, y: aten.upsample_nearest3d.vec(x.unsqueeze(2), None, SCALES[5])),
    "upsample_trilinear3d": (lambda x, y: ops.upsample_trilinear3d.vec(x.unsqueeze(2), None, False, SCALES[5], 1), lambda x, y: aten.upsample_trilinear3d.vec(x.unsqueeze(2), None, False, SCALES[5])),
    "pow": (lambda x, y: ops.pow.Tensor_Scalar(x, 2.0, 1), lambda x, y: aten.pow.Tensor_Scalar(x, 2.0)),
    "pow of two": (lambda x, y: ops.pow.Tensor_Tensor(x, y, 1), lambda x, y: aten.pow.Tensor_Tensor(x, y)),
    "add": (lambda x, y: ops.add(x, y, 1, 1), lambda x, y: x + y),
    "sub": (lambda x, y: ops.sub.Tensor(x, y, 1, 1), lambda x, y: x - y),
    "mul": (lambda x, y: ops.mul(x, y, 1), lambda x, y: x * y),
    "div": (lambda x, y: ops.div.Tensor(x, y, 1), lambda x, y: x / y),
    "addcmul": (lambda x, y: ops.addcmul(x, y, y, 1), lambda x, y: aten.addcmul(x, y, y)),
    "atan2": (lambda x, y: ops.atan2(x, y, 1), lambda x, y: aten.atan2(x, y)),
    "stack": (lambda x, y: ops.stack([x, y], 0, 1), lambda x, y: torch.stack([x, y])),
    "cat": (lambda x, y: ops.cat([x, y], 0, 1), lambda x, y: torch.cat([x, y])),
    "vector norm": (lambda x, y: ops.linalg_vector_norm(x, 2.0, [1], False, None, 1), lambda x, y: aten.linalg_vector_norm(x, 2.0, [1])),
    "vector norm with a dtype": (lambda x, y: ops.linalg_vector_norm(x, 2.0, [1], False, dtype=x.dtype, recompute=1), lambda x, y: aten.linalg_vector_norm(x, 2.0, [1], dtype=x.dtype)),
    "softmax": (lambda x, y: ops.softmax(x, 1, None, 1), lambda x, y: torch.softmax(x, 1)),
    "softmax with a dtype": (lambda x, y: ops.softmax(x, 1, torch.bfloat16, 1), lambda x, y: torch.softmax(x, 1, torch.bfloat16)),
    "layer norm": (lambda x, y: ops.layer_norm(x, [6], recompute=1), lambda x, y: torch.layer_norm(x, [6])),
    "rms norm": (lambda x, y: ops.rms_norm(x, [6], recompute=1), lambda x, y: torch.rms_norm(x, [6])),
    "rms norm with a weight": (lambda x, y: ops.rms_norm(x, [6], tensor(6), 1e-5, 1), lambda x, y: torch.rms_norm(x, [6], tensor(6), 1e-5)),
    "group norm": (lambda x, y: ops.group_norm(x, 2, recompute=1), lambda x, y: torch.group_norm(x, 2)),
    "group norm with an activation": (lambda x, y: ops.group_norm_act(x, 2, None, None, 1e-5, False, "silu", [], 1), lambda x, y: torch.nn.functional.silu(torch.group_norm(x, 2))),
    "conv2d": (lambda x, y: ops.conv2d(x, tensor(8, 8, 3, 3), recompute=1), lambda x, y: torch.conv2d(x, tensor(8, 8, 3, 3))),
    "linear": (lambda x, y: ops.linear(x, tensor(5, 6), None, 1), lambda x, y: torch.nn.functional.linear(x, tensor(5, 6))),
    "matmul": (lambda x, y: ops.matmul(x, y, 1), lambda x, y: torch.matmul(x, y)),
    "prelu": (lambda x, y: ops.prelu(x, tensor(8), 1), lambda x, y: torch.prelu(x, tensor(8))),
    "attention": (lambda x, y: ops.scaled_dot_product_attention(x, y, x, recompute=1), lambda x, y: torch.nn.functional.scaled_dot_product_attention(x, y, x)),
    "cross entropy": (lambda x, y: ops.cross_entropy_loss(x, labels(2, 6, 6)), lambda x, y: torch.nn.functional.cross_entropy(x, labels(2, 6, 6))),
    "cross entropy, smoothed": (lambda x, y: ops.cross_entropy_loss(x, labels(2, 6, 6), None, 1, -100, 0.1), lambda x, y: torch.nn.functional.cross_entropy(x, labels(2, 6, 6), label_smoothing=0.1)),
    "cross entropy with weights": (lambda x, y: ops.cross_entropy_loss(x, labels(2, 6, 6), torch.rand(8, device="cuda")), lambda x, y: torch.nn.functional.cross_entropy(x, labels(2, 6, 6), torch.rand(8, device="cuda"))),
}  # fmt: skip


def labels(*shape):
    return torch.zeros(*shape, dtype=torch.long, device="cuda")


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def autocast(request):
    with FakeTensorMode(allow_non_fake_inputs=True):
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", request.param)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.clear_autocast_cache()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_are_as_pytorchs(autocast, name, dtype):
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    ours, pytorchs = CASES[name]
    assert result_of(lambda: ours(tensor(2, 8, 6, 6, dtype=dtype), tensor(2, 8, 6, 6, dtype=other))) == result_of(
        lambda: pytorchs(tensor(2, 8, 6, 6, dtype=dtype), tensor(2, 8, 6, 6, dtype=other))
    )



@pytest.mark.parametrize("name", ["cross entropy", "cross entropy with weights", "rms norm", "rms norm with a weight", "layer norm", "group norm", "linear", "softmax"])
def test_they_are_ours(autocast, name):
    """And so keep what they keep without autocast."""
    half = tensor(2, 8, 6, 6, dtype=torch.bfloat16)
    assert "tsmem" in CASES[name][0](half, half).grad_fn.name()
