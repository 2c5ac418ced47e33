"""PyTorch's functional operators in terms of ours: by name of the OpInfo, what is called with the sample's arguments."""
import torch

FUNCTIONAL = "nn.functional."


def _act(name, *defaults):
    """defaults: (keyword, default) of the activation's arguments."""

    def call(ops, x, *args, inplace=False, **kwargs):
        values = list(args) + [kwargs.get(k, d) for k, d in defaults[len(args) :]]
        return ops.act(x, name, [float(v) for v in values])

    return call


def _gelu(ops, x, approximate="none"):
    if approximate not in ("none", "tanh"):
        return None
    return ops.act(x, "gelu" if approximate == "none" else "gelu_tanh", [])


def _hardtanh(ops, x, min_val=-1.0, max_val=1.0, inplace=False):
    if min_val > max_val:  # F.hardtanh checks in Python
        raise ValueError("min_val cannot be greater than max_val")
    return ops.act(x, "hardtanh", [float(min_val), float(max_val)])


def _elu(ops, x, alpha=1.0, inplace=False):
    return ops.act(x, "elu", [alpha, 1.0, 1.0])


def _celu(ops, x, alpha=1.0, inplace=False):
    return ops.act(x, "elu", [alpha, 1.0, 1.0 / alpha])


def _selu(ops, x, inplace=False):
    return ops.act(x, "elu", [1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0])


def _batch_norm(ops, x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    if training:  # F.batch_norm checks in Python
        torch.nn.functional._verify_batch_size(x.size())
    return ops.batch_norm_act(x, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled, "identity", [])


def _instance_norm(ops, x, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
    if use_input_stats:
        torch.nn.functional._verify_spatial_size(x.size())
    return ops.instance_norm_act(x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, torch.backends.cudnn.enabled, "identity", [])


def _group_norm(ops, x, groups, weight=None, bias=None, eps=1e-5):
    if x.dim() < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {x.dim()}")
    torch.nn.functional._verify_batch_size([x.size(0) * x.size(1) // groups, groups] + list(x.size()[2:]))
    return ops.group_norm(x, groups, weight, bias, eps)


def _dropout(name):
    def call(ops, x, p=0.5, training=True, inplace=False):
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        return getattr(ops, name)(x, p, training)

    return call


def _per_sample(f, ops, x, *args, **kwargs):
    """As F.dropout3d does in Python: a sample without a batch is a batch of one."""
    return f(ops, x, *args, **kwargs) if x.dim() == 5 else f(ops, x.unsqueeze(0), *args, **kwargs).squeeze(0)


def _max_pool(name):
    def call(ops, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        if return_indices:
            return None  # has no twin
        return getattr(ops, name)(x, kernel_size, [] if stride is None else stride, padding, dilation, ceil_mode)

    return call


def _avg_pool(name):
    def call(ops, x, kernel_size, stride=None, *args, **kwargs):
        return getattr(ops, name)(x, kernel_size, [] if stride is None else stride, *args, **kwargs)

    return call


def _adaptive_max_pool(name):
    def call(ops, x, output_size, return_indices=False):
        if return_indices:
            return None
        # F.adaptive_max_pool fills in sizes that are None
        size = torch.nn.functional._list_with_default(output_size, x.size()) if isinstance(output_size, (tuple, list)) else output_size
        return getattr(ops, name)(x, size)

    return call


def _adaptive_avg_pool(name):
    def call(ops, x, output_size):
        size = torch.nn.functional._list_with_default(output_size, x.size()) if isinstance(output_size, (tuple, list)) else output_size
        return getattr(ops, name)(x, size)

    return call


def _pad(ops, x, pad, mode="constant", value=None):
    return ops.pad(x, pad, mode, value)


def _direct(name):
    return lambda ops, *args, **kwargs: getattr(ops, name)(*args, **kwargs)


def _softmax(ops, x, dim=None, dtype=None, **unused):
    return ops.softmax(x, dim, dtype)


def _cross_entropy(ops, x, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    return ops.cross_entropy_loss(x, target, weight, ["none", "mean", "sum"].index(reduction), ignore_index, label_smoothing)


def _roll(ops, x, shifts, dims=()):
    return ops.roll(x, shifts if isinstance(shifts, (tuple, list)) else [shifts], dims if isinstance(dims, (tuple, list)) else [dims])


def _attention(ops, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return ops.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


TWINS = {
    "add": _direct("add"),
    "mul": _direct("mul"),
    "cat": lambda ops, tensors, dim=0, out=None: None if out is not None else ops.cat(tensors, dim),
    "matmul": _direct("matmul"),
    "softmax": _softmax,
    "roll": _roll,
    "reshape": _direct("reshape"),
    "contiguous": _direct("contiguous"),
    "sigmoid": _act("sigmoid"),
    "tanh": _act("tanh"),
    **{
        FUNCTIONAL + name: call
        for name, call in {
            "relu": _act("relu"),
            "relu6": lambda ops, x, inplace=False: ops.act(x, "hardtanh", [0.0, 6.0]),
            "hardtanh": _hardtanh,
            "threshold": _act("threshold", ("threshold", None), ("value", None)),
            "leaky_relu": _act("leaky_relu", ("negative_slope", 0.01)),
            "hardsigmoid": _act("hardsigmoid"),
            "silu": _act("silu"),
            "hardswish": _act("hardswish"),
            "gelu": _gelu,
            "elu": _elu,
            "celu": _celu,
            "selu": _selu,
            "softplus": _act("softplus", ("beta", 1.0), ("threshold", 20.0)),
            "mish": _act("mish"),
            "prelu": _direct("prelu"),
            "glu": _direct("glu"),
            "rrelu": lambda ops, x, lower=1 / 8, upper=1 / 3, training=False, inplace=False: ops.rrelu(x, lower, upper, training, 0, []),
            "batch_norm": _batch_norm,
            "instance_norm": _instance_norm,
            "group_norm": _group_norm,
            "layer_norm": _direct("layer_norm"),
            "cross_entropy": _cross_entropy,
            "linear": _direct("linear"),
            "scaled_dot_product_attention": _attention,
            "dropout": _dropout("dropout"),
            "alpha_dropout": _dropout("alpha_dropout"),
            "feature_alpha_dropout": lambda ops, x, p=0.5, training=False, inplace=False: ops.feature_alpha_dropout(x, p, training),
            "dropout2d": _dropout("feature_dropout"),
            "dropout3d": lambda ops, x, *args, **kwargs: _per_sample(_dropout("feature_dropout"), ops, x, *args, **kwargs),
            "pad": _pad,
            "conv1d": _direct("conv1d"),
            "conv2d": _direct("conv2d"),
            "conv3d": _direct("conv3d"),
            "conv_transpose1d": _direct("conv_transpose1d"),
            "conv_transpose2d": _direct("conv_transpose2d"),
            "conv_transpose3d": _direct("conv_transpose3d"),
            **{f"max_pool{d}d": _max_pool(f"max_pool{d}d") for d in (1, 2, 3)},
            **{f"avg_pool{d}d": _avg_pool(f"avg_pool{d}d") for d in (1, 2, 3)},
            **{f"adaptive_max_pool{d}d": _adaptive_max_pool(f"adaptive_max_pool{d}d") for d in (1, 2, 3)},
            **{f"adaptive_avg_pool{d}d": _adaptive_avg_pool(f"adaptive_avg_pool{d}d") for d in (1, 2, 3)},
        }.items()
    },
}
