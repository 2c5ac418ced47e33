"""Differentiable cases: an op's call with some of its operands made again in backward, and PyTorch's operators that it stands for."""

import itertools

import torch
import torch.nn.functional as F
import tsmem  # noqa: F401  loads the operators

ops = torch.ops.tsmem
SDPA = F.scaled_dot_product_attention
WAYS = (0, 1, 2, 3)  # the argument `recompute`: kept, held for those nearby, made by each, cheap layers too


def norm(training):
    def arguments(t):
        c = t.shape[1]
        return (torch.linspace(-0.1, 0.1, c, dtype=t.dtype), torch.linspace(0.5, 2, c, dtype=t.dtype)), training

    return arguments


def pytorchs_norm(t, w, b, training):
    (mean, var), _ = norm(training)(t)
    return F.batch_norm(t, mean, var, w, b, training, 0.1, 1e-5)


def ours_norm(op, t, w, b, training, *rest):
    (mean, var), _ = norm(training)(t)
    return op(t, w, b, mean, var, training, 0.1, 1e-5, True, *rest)


def image(*channels):
    return [torch.randn(2, c, 10, 9, dtype=torch.float64) for c in channels]


def numbers(*shapes):
    return [torch.randn(s, dtype=torch.float64) / 2 for s in shapes]


# Name: leaves, ours (of `again` and the leaves), PyTorch's. The first leaf is a silu's input, whose output is made again.
def cases():
    torch.manual_seed(0)
    found = {}
    for training, kind in itertools.product((True, False), ("relu", "silu", "identity", "leaky_relu")):
        args = [0.1] if kind == "leaky_relu" else []
        plain = {"relu": F.relu, "silu": F.silu, "identity": lambda t: t, "leaky_relu": lambda t: F.leaky_relu(t, 0.1)}[kind]
        name = f"{kind} {'training' if training else 'evaluation'}"
        found[f"batch norm, {name}"] = (
            [*image(8), *numbers(8, 8, (4, 8, 3, 3))],
            lambda r, x, w, b, c, k=kind, a=args, t=training: ops.conv2d(ours_norm(ops.batch_norm_act, x, w, b, t, k, a, r), c, None, [1, 1], [1, 1], recompute=r),
            lambda x, w, b, c, p=plain, t=training: F.conv2d(p(pytorchs_norm(x, w, b, t)), c, padding=1),
        )  # fmt: skip
        found[f"batch norm and sum, {name}"] = (
            [*image(8, 8), *numbers(8, 8)],
            lambda r, x, y, w, b, k=kind, a=args, t=training: ops.act(ours_norm(ops.batch_norm_add_act, x, w, b, t, y, k, a, r), "tanh", [], r),
            lambda x, y, w, b, p=plain, t=training: torch.tanh(p(pytorchs_norm(x, w, b, t) + y)),
        )  # fmt: skip
        found[f"batch norm and max pool, {name}"] = (
            [*image(8), *numbers(8, 8)],
            lambda r, x, w, b, k=kind, a=args, t=training: ours_norm(ops.batch_norm_act_max_pool2d, x, w, b, t, k, a, [3, 3], [2, 2], [1, 1], [1, 1], True, r),
            lambda x, w, b, p=plain, t=training: F.max_pool2d(p(pytorchs_norm(x, w, b, t)), 3, 2, 1, ceil_mode=True),
        )  # fmt: skip
        found[f"convolution, batch norm, {name}"] = (
            [*image(8), *numbers((8, 8, 3, 3), 8, 8, 8)],
            lambda r, x, c, d, w, b, k=kind, a=args, t=training: ops.conv_batch_norm_act(
                x, c, d, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, w, b, *norm(t)(x)[0], t, 0.1, 1e-5, True, k, a, bool(r)),
            lambda x, c, d, w, b, p=plain, t=training: p(pytorchs_norm(F.conv2d(x, c, d, padding=1), w, b, t)),
        )  # fmt: skip
        if kind == "silu":  # PyTorch's own derivatives forget a bias without a weight
            found[f"batch norm with a bias alone, {name}"] = (
                [*image(8), *numbers(8)],
                lambda r, x, b, t=training: ours_norm(ops.batch_norm_act, x, None, b, t, "silu", [], r),
                lambda x, b, t=training: F.silu(pytorchs_norm(x, torch.ones_like(b), b, t)),
            )
    found["norms with a bias alone"] = (
        [*image(8), *numbers(8, 9)],
        lambda r, x, b, d: ops.group_norm_act(ops.layer_norm(x, [9], None, d, 1e-5, True, r), 4, None, b, 1e-5, True, "silu", [], r),
        lambda x, b, d: F.silu(F.group_norm(F.layer_norm(x, [9], torch.ones_like(d), d), 4, torch.ones_like(b), b)),
    )
    found["instance norm"] = (
        [*image(8), *numbers(8, 8)],
        lambda r, x, w, b: ops.instance_norm_act(x, w, b, None, None, True, 0.1, 1e-5, True, "silu", [], r),
        lambda x, w, b: F.silu(F.instance_norm(x, weight=w, bias=b)),
    )
    found["group norm and layer norm"] = (
        [*image(8), *numbers(8, 8, 9, 9)],
        lambda r, x, w, b, v, d: ops.layer_norm(ops.group_norm(x, 4, w, b, 1e-5, True, r), [9], v, d, 1e-5, True, r),
        lambda x, w, b, v, d: F.layer_norm(F.group_norm(x, 4, w, b), [9], v, d),
    )
    found["group norm with its activation"] = (
        [*image(8), *numbers(8, 8)],
        lambda r, x, w, b: ops.group_norm_act(x, 4, w, b, 1e-5, True, "silu", [], r),
        lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)),
    )
    found["squeeze and excite"] = (
        [*image(8), *numbers((2, 8, 1, 1))],
        lambda r, x, s: ops.conv2d(ops.mul_act(ops.act(x, "silu", [], r), s, x, "silu", [], r), torch.ones(2, 8, 1, 1, dtype=x.dtype), recompute=r),
        lambda x, s: F.conv2d(F.silu(x) * s, torch.ones(2, 8, 1, 1, dtype=x.dtype)),
    )
    found["squeeze and excite of a norm"] = (
        [*image(8), *numbers((2, 8, 1, 1), 8, 8)],
        lambda r, x, s, w, b: excited(r, x, s, w, b),
        lambda x, s, w, b: F.silu(pytorchs_norm(x, w, b, True)) * s,
    )
    rows = torch.randn(2, 40, 12, dtype=torch.float64)
    found["layers of a transformer"] = (
        [rows, *numbers(12, (24, 12), 24, (12, 24), 12)],
        lambda r, x, g, w, b, v, c: ops.linear(ops.act(ops.linear(ops.rms_norm(x, [12], g, 1e-6, r), w, b, r), "gelu", [], r), v, c, r),
        lambda x, g, w, b, v, c: F.linear(F.gelu(F.linear(F.rms_norm(x, [12], g, 1e-6), w, b)), v, c),
    )
    found["a layer by addmm"] = (
        [rows.flatten(0, 1), *numbers((12, 30), 30, (30, 5))],
        lambda r, x, w, b, v: ops.mm(ops.act(ops.addmm(b, x, w, recompute=r), "tanh", [], r), v, r),
        lambda x, w, b, v: torch.mm(torch.tanh(torch.addmm(b, x, w)), v),
    )
    heads = torch.randn(2, 3, 24, 6, dtype=torch.float64)
    for causal in (False, True):
        found[f"attention{', causal' if causal else ''}"] = (
            [heads, *(torch.randn_like(heads) for _ in range(2))],
            lambda r, q, k, v, c=causal: ops.scaled_dot_product_attention(q, ops.act(k, "tanh", [], r), v, None, 0.0, c, recompute=r),
            lambda q, k, v, c=causal: SDPA(q, torch.tanh(k), v, is_causal=c),
        )
    found["attention with a mask that learns"] = (
        [heads, *(torch.randn_like(heads) for _ in range(2)), torch.randn(3, 24, 24, dtype=torch.float64)],
        lambda r, q, k, v, m: ops.scaled_dot_product_attention(q, k, v, m, recompute=r),
        lambda q, k, v, m: SDPA(q, k, v, m),
    )
    found["attention in parts"] = (
        [heads, torch.randn_like(heads)],
        lambda r, q, k: ops.matmul(ops.softmax(ops.matmul(q, k.mT, r), -1, None, r), ops.act(k, "tanh", [], r), r),
        lambda q, k: torch.softmax(q @ k.mT, -1) @ torch.tanh(k),
    )
    found["factors that are copied"] = (
        [torch.randn(3, 1, 24, 6, dtype=torch.float64), torch.randn(4, 6, 24, dtype=torch.float64)],
        lambda r, a, b: ops.matmul(a.expand(3, 4, 24, 6), b, r),
        lambda a, b: a.expand(3, 4, 24, 6) @ b,
    )
    found["cheap operators"] = (
        [*image(8), *numbers((8, 1, 1))],
        lambda r, x, s: ops.cat([ops.exp(ops.mul(x, s, r), r), ops.div(x, ops.add(ops.square(x, r), s.square() + 1, 1, r), r), ops.sqrt(ops.square(x, r) + 1, r), ops.mul(ops.tanh(x, r), ops.sigmoid(ops.mul(x, s, r), r), r)], 1, r),
        lambda x, s: torch.cat([torch.exp(x * s), x / (x.square() + s.square() + 1), torch.sqrt(x.square() + 1), torch.tanh(x) * torch.sigmoid(x * s)], 1),
    )  # fmt: skip
    found["prelu and glu"] = (
        [*image(8), *numbers(8)],
        lambda r, x, w: ops.glu(ops.prelu(x, w, r), 1, r),
        lambda x, w: F.glu(F.prelu(x, w), 1),
    )
    found["transposed convolution"] = (
        [*image(8), *numbers((8, 4, 3, 3), 4)],
        lambda r, x, w, b: ops.conv_transpose2d(x, w, b, [2, 2], [1, 1], [1, 1], recompute=r),
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1),
    )
    classes, target = torch.randn(60, 11, dtype=torch.float64), torch.arange(60) % 11
    found["cross entropy"] = (
        [classes, *numbers((11, 11))],
        lambda r, x, w: ops.cross_entropy_loss(ops.linear(x, w, None, r), target),
        lambda x, w: F.cross_entropy(F.linear(x, w), target),
    )
    return found


def excited(r, x, s, w, b):
    (mean, var), _ = norm(True)(x)
    out, mean, invstd = ops.batch_norm_act_stats(x, w, b, mean, var, True, 0.1, 1e-5, True, "silu", [], r)
    return ops.mul_batch_norm_act(out, s, x, w, b, mean, invstd, "silu", [], r)


CASES = cases()


def fresh(leaves, needs=None):
    needs = needs or [True] * len(leaves)
    return [t.clone().requires_grad_(n) for t, n in zip(leaves, needs, strict=True)]
