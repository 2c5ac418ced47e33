"""Writes random programs: Python source of a module `P` that TorchScript can compile, and how it is to be called.

A program is text: what is compared, reduced and printed is the same file. `program(seed)` gives it; one seed, one program.
"""
import contextlib
import random
import re
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Tuple

Shape = Tuple[int, ...]

HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from typing import Dict, List, Optional, Tuple
"""


@dataclass
class Var:
    name: str
    shape: Shape
    argument: bool = False


@dataclass
class Class:
    name: str
    annotations: List[str] = field(default_factory=list)
    init: List[str] = field(default_factory=list)
    methods: List[str] = field(default_factory=list)
    counts: Dict[str, int] = field(default_factory=dict)
    modules: Dict[str, List[str]] = field(default_factory=dict)  # by kind and shape: those that can be called again


@dataclass
class Block:
    """A class of the program's own that can be called: what comes in and what goes out."""

    name: str
    takes: List[Shape]
    gives: List[Shape]  # several: a tuple
    flag: bool
    made: bool = False  # instances that exist


@dataclass
class Program:
    rng: random.Random
    main: Shape
    dtype: str
    how: str
    classes: List[str] = field(default_factory=list)
    functions: List[Tuple[str, str]] = field(default_factory=list)  # name, source
    blocks: List[Block] = field(default_factory=list)
    count: int = 0


@dataclass
class Writer:
    """One method that is being written."""

    p: Program
    c: Class
    env: List[Var]
    lines: List[str] = field(default_factory=list)
    indent: int = 2
    depth: int = 0
    loops: int = 0  # that are around
    flag: bool = False  # has the arguments `flag` and `n`
    names: int = 0
    in_block: bool = False
    returns: List[str] = field(default_factory=list)

    def put(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def chance(self, p: float) -> bool:
        return self.p.rng.random() < p

    def one(self, *options):
        return self.p.rng.choice(options)


# --- names, values ---------------------------------------------------------------------------------------------------


def fresh(w: Writer) -> str:
    w.names += 1
    return f"v{w.names}"


def pick(w: Writer, shape: Shape = None, fit: Callable[[Shape], bool] = None) -> Var:
    """A value, newer ones more often; None where there is none."""
    found = [v for v in w.env if (shape is None or v.shape == shape) and (fit is None or fit(v.shape))]
    if not found:
        return None
    return found[-1] if w.chance(0.45) else w.p.rng.choice(found)


def image(w: Writer) -> Var:
    return pick(w, w.p.main)


def define(w: Writer, expression: str, shape: Shape) -> Var:
    """`name = expression`: a new name, or one of the same shape anew."""
    same = [v for v in w.env if v.shape == shape]
    if same and w.chance(0.3):
        v = w.p.rng.choice(same)
        w.put(f"{v.name} = {expression}")
        w.env.remove(v)
        w.env.append(v)  # the newest
        return v
    v = Var(fresh(w), shape)
    w.put(f"{v.name} = {expression}")
    w.env.append(v)
    return v


def number(w: Writer, kind: str) -> str:
    w.c.counts[kind] = w.c.counts.get(kind, -1) + 1
    return f"{kind}{w.c.counts[kind]}"


def module(w: Writer, kind: str, make: str) -> str:
    """self.NAME for a module made by `make`; now and then one that is there already."""
    known = w.c.modules.setdefault(make, [])
    if known and w.chance(0.25):
        return w.p.rng.choice(known)
    name = "self." + number(w, kind)
    w.c.init.append(f"{name} = {make}")
    known.append(name)
    return name


def parameter(w: Writer, shape: Shape, scale: float = 0.3) -> str:
    make = f"nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale})"
    return module(w, "w", make)


# --- expressions of one shape ----------------------------------------------------------------------------------------

ACTIVATIONS = (
    "F.relu({v})|torch.relu({v})|{v}.relu()|F.relu6({v})|F.hardtanh({v})|F.hardtanh({v}, -0.5, 0.75)|F.threshold({v}, 0.25, -1.0)|F.leaky_relu({v}, 0.25)"
    "|F.leaky_relu({v}, 0.1)|F.hardsigmoid({v})|F.silu({v})|{v} * torch.sigmoid({v})|{v} * {v}.sigmoid()|torch.sigmoid({v}) * {v}|{v}.mul({v}.sigmoid())|F.gelu({v})"
    "|F.gelu({v}, approximate='tanh')|F.hardswish({v})|{v} * F.hardsigmoid({v})|{v} * F.relu6({v} + 3.0) / 6.0|{v} * 0.5 * (1.0 + torch.erf({v} / 1.4142135623730951))|0.5 * {v} * (1.0 + torch.tanh(0.7978845608028654 * ({v} + 0.044715 * torch.pow({v}, 3.0))))|{v} * torch.tanh(F.softplus({v}))|torch.sigmoid({v})|{v}.sigmoid()"
    "|torch.tanh({v})|{v}.tanh()|F.elu({v})|F.elu({v}, 0.5)|F.selu({v})|F.celu({v})|F.celu({v}, 0.5)|F.softplus({v})|F.softplus({v}, 2.0, 10.0)|F.mish({v})|F.logsigmoid({v})"
    "|F.softsign({v})|F.tanhshrink({v})|{v}.clamp_min(0.0)|{v}.clamp(min=0.0)|{v}.clamp(-1.0, 1.0)|torch.clip({v}, 0.0, 6.0)|F.softshrink({v}, 0.25)|torch.selu({v})|torch.celu({v})"
    "|F.relu({v}, inplace=False)|F.hardshrink({v}, 0.25)|torch.where({v} > 0, {v}, 0.25 * {v})|torch.maximum({v}, torch.zeros_like({v}))|torch.nn.functional.silu({v}, inplace=False)"
).split("|")
IN_PLACE = (
    "F.relu({v}, inplace=True)|F.relu_({v})|torch.relu_({v})|{v}.relu_()|F.relu6({v}, inplace=True)|F.hardtanh({v}, -0.5, 0.75, inplace=True)|F.hardtanh_({v})"
    "|F.threshold({v}, 0.25, -1.0, inplace=True)|F.leaky_relu({v}, 0.25, inplace=True)|F.leaky_relu_({v}, 0.25)|F.hardsigmoid({v}, inplace=True)|F.silu({v}, inplace=True)"
    "|F.hardswish({v}, inplace=True)|{v}.sigmoid_()|torch.sigmoid_({v})|{v}.tanh_()|torch.tanh_({v})|F.elu({v}, 0.5, inplace=True)|F.elu_({v})|F.selu({v}, inplace=True)|torch.selu_({v})"
    "|F.celu({v}, 0.5, inplace=True)|F.mish({v}, inplace=True)|{v}.clamp_min_(0.0)|{v}.clamp_(-1.0, 1.0)|{v}.add_(0.5)|{v}.mul_(0.5)|{v}.sub_(0.25)|{v}.div_(2.0)|{v}.neg_()|{v}.abs_()"
    "|{v}.exp_().clamp_(0.0, 3.0)|{v}.zero_()|{v}.fill_(0.5)|{v}.square_()|torch.celu_({v})|F.threshold_({v}, 0.0, 0.5)"
).split("|")
ARITHMETIC = (
    "{v}.abs()|-{v}|{v}.neg()|torch.exp(-{v}.abs())|{v}.square()|{v}.pow(2)|torch.sqrt({v}.abs() + 0.1)|{v} + 1.0|{v} * 0.5|{v} - 0.5|{v} / 2.0|2.0 - {v}|{v} + {v}|{v} * {v}|torch.add({v}, {v})"
    "|F.relu({v} + {v})|torch.cumsum({v}, 1)|F.normalize({v}, dim=1)|torch.flip({v}, [1])|{v}.clone()|{v}.detach()|{v}.float()|{v}.double()|{v} - {v}.mean()|{v} * {v}.mean()"
    "|{v} - {v}.mean(dim=1, keepdim=True)|{v}.type_as({v})|torch.rsqrt({v}.abs() + 0.5)|torch.sin({v})|torch.log1p({v}.abs())|1.0 / ({v}.abs() + 1.0)|{v}.add({v}, alpha=2)|{v}.expand_as({v})"
    "|torch.zeros_like({v})|{v} + torch.ones_like({v})|{v}.to({v}.dtype)|torch.atan({v})|torch.erf({v})|torch.reciprocal({v}.abs() + 1.0)|{v}.masked_fill({v} > 0.5, 0.25)|torch.where({v} > 0, {v}, 0.5)"
    "|{v} - {v}.norm(2, 1, True)|({v} - {v}.mean(1, True)) / torch.sqrt({v}.var(1, False, True) + 0.1)|{v} * torch.rsqrt({v}.pow(2).mean(-1, keepdim=True) + 1e-5)|{v}.index_select(1, torch.arange({v}.size(1)))"
    "|{v}[torch.arange({v}.size(0) - 1, -1, -1)]|torch.gather({v}, 1, {v}.argsort(1))|F.pad({v}, [1, 1])[..., 1:-1]|torch.cos({v})|torch.pow(2.0, {v}.clamp(-1.0, 1.0))|{v}.repeat_interleave(2, 1)[:, ::2]"
    "|torch.cat([-{v}[..., 1:], {v}[..., :1]], -1)|{v}.pow(3) * 0.1|{v} / ({v}.std(1, keepdim=True) + 0.5)"
).split("|")
ALIASES = (
    "{v}|{v}.view_as({v})|{v}.type_as({v})|{v}.sum_to_size({v}.size())|torch.einsum('...->...', {v})|{v}[:]|{v}.contiguous()|F.dropout({v}, 0.5, False)|{v}.expand_as({v})|{v}.unsqueeze(0).squeeze(0)|{v}.transpose(0, 1).transpose(0, 1)|{v}.reshape({v}.shape)|{v}.view({v}.size())"
    "|{v}.narrow(0, 0, {v}.size(0))|[{v}][0]|({v}, {v})[1]|{v}.to({v}.dtype)|{v}.flatten(0, 1).view({v}.size())|{v}.alias()|torch.view_as_real(torch.view_as_complex({v}.detach().view(-1, 2))).view({v}.size())"
    "|{v}.swapaxes(0, 1).swapaxes(0, 1)|{v}.movedim(0, 1).movedim(1, 0)|F.identity({v})"
).replace("|F.identity({v})", "").replace("|{v}.alias()", "").split("|")
BINARY = (
    "{a} + {b}|{a} * {b}|{a} - {b}|torch.add({a}, {b})|{a}.add({b})|torch.mul({a}, {b})|{a}.mul({b})|torch.add({a}, {b}, alpha=2)|{a}.sub({b})|torch.maximum({a}, {b})|torch.minimum({a}, {b})"
    "|torch.where({a} > 0, {a}, {b})|{a} / ({b}.abs() + 1.0)|torch.lerp({a}, {b}, 0.25)|{a} * torch.sigmoid({b})|torch.sigmoid({a}) * {b}|F.silu({a}) * {b}|F.gelu({b}) * {a}|F.relu({a} + {b})|F.relu({a}) + {b}"
    "|torch.addcmul({a}, {a}, {b})|{a} + {b}.detach()|torch.stack([{a}, {b}]).sum(0)|torch.stack([{a}, {b}]).mean(0)|sum([{a}, {b}])|{a} + {b} + {a}|{a} * {b} + {b}|torch.hypot({a}.abs() + 1.0, {b})|({a} + {b}).relu_()"
    "|F.relu({a} + {b}, inplace=True)|F.silu({a}) * F.silu({b})|torch.tanh({a}) * torch.sigmoid({b})|F.hardsigmoid({a}) * {b}|F.mish({a}) * {b}|F.elu({a}) * {b}|{a} * F.softplus({b})|F.glu(torch.cat([{a}, {b}], 1), 1)"
).replace("|sum([{a}, {b}])", "").split("|")
IN_PLACE_BINARY = (
    "{a} += {b}|{a} *= {b}|{a} -= {b}|{a}.add_({b})|{a}.mul_({b})|{a}.sub_({b})|{a}.copy_({b})|{a}.add_({b}, alpha=2)|{a}.addcmul_({b}, {b})|{a} += {a}|{a}.add_(F.relu({b}))|{a} *= torch.sigmoid({b})|{a}.lerp_({b}, 0.5)"
    "|{a}.masked_fill_({b} > 0.5, 0.25)|{a} /= 2.0 + {b}.abs()|{a}[:, :1] += {b}[:, :1]|{a}[:, 0] = {b}[:, 1]|{a}[0] = {b}[0]|{a}[:, 1:].mul_(0.5)|{a}[0].zero_()|{a}.select(1, 0).add_(1.0)|{a}[:, 1].relu_()"
    "|F.relu({a}[:, 1:], inplace=True)|{a}.transpose(0, 1).add_(0.5)|{a}.view(-1)[::2].mul_(0.5)|{a}.flatten()[:3].fill_(0.0)|F.relu_({a}.view(-1))|{a}.unsqueeze(0).add_({b})|{a}.detach().mul_(0.5)|{a}.data.add_(0.25)"
).replace("|{a}.data.add_(0.25)", "").split("|")
DROPOUTS = (
    "F.dropout({v}, 0.3, self.training)|F.dropout({v}, 0.5, True)|F.dropout({v}, 0.0, self.training)|F.dropout({v}, 1.0, self.training)|F.dropout({v}, 0.5, self.training, inplace=True)|F.dropout2d({v}, 0.4, self.training)"
    "|F.alpha_dropout({v}, 0.3, self.training)|F.feature_alpha_dropout({v}, 0.3, self.training)|torch.dropout({v}, 0.3, self.training)|torch.dropout_({v}, 0.3, self.training)|F.dropout({v}, training=self.training)"
    "|F.dropout({v}, p=0.25)|F.dropout({v}, 0.3, False)|torch.feature_dropout({v}, 0.4, self.training)|F.rrelu({v}, 0.1, 0.4, self.training)|F.rrelu({v}, 0.1, 0.4, True)"
).split("|")


def expression(w: Writer, options: List[str]) -> None:
    v = pick(w) if w.chance(0.3) else image(w) or pick(w)
    define(w, w.one(*options).format(v=v.name), v.shape)


def s_activation(w):
    expression(w, ACTIVATIONS)


def s_activation_module(w):
    v = image(w) or pick(w)
    i = w.one("True", "False")
    make = w.one(f"nn.ReLU({i})", f"nn.ReLU(inplace={i})", f"nn.ReLU6({i})", f"nn.SiLU({i})", f"nn.Hardswish({i})", f"nn.Hardsigmoid({i})", "nn.Sigmoid()", "nn.Tanh()", "nn.GELU()",
                 "nn.GELU(approximate='tanh')", f"nn.ELU(0.5, {i})", f"nn.LeakyReLU(0.25, {i})", f"nn.Hardtanh(-0.5, 0.75, {i})", f"nn.Mish({i})", "nn.Softplus()", f"nn.SELU({i})", f"nn.CELU(0.5, {i})",
                 f"nn.Threshold(0.25, 0.0, {i})", "nn.Identity()", "nn.Softmax(dim=1)", "nn.LogSoftmax(dim=-1)", "nn.PReLU()", f"nn.PReLU({v.shape[1]})", f"nn.RReLU(0.1, 0.4, {i})", "nn.Softsign()", "nn.LogSigmoid()", "nn.Hardshrink()", "nn.Softmax2d()")
    if len(v.shape) != 4 and "2d" in make:
        make = "nn.ReLU()"
    define(w, f"{module(w, 'act', make)}({v.name})", v.shape)


def s_in_place(w):
    v = image(w) or pick(w)
    text = w.one(*IN_PLACE).format(v=v.name)
    if w.chance(0.35):
        w.put(text)
    else:
        define(w, text, v.shape)


def s_arithmetic(w):
    expression(w, ARITHMETIC)


def s_alias(w):
    expression(w, ALIASES)


def s_binary(w):
    a = image(w) or pick(w)
    b = pick(w, a.shape)
    define(w, w.one(*BINARY).format(a=a.name, b=b.name), a.shape)


def s_in_place_binary(w):
    a = image(w) or pick(w)
    b = pick(w, a.shape)
    w.put(w.one(*IN_PLACE_BINARY).format(a=a.name, b=b.name))


def s_dropout(w):
    v = image(w) or pick(w)
    if w.chance(0.4):
        makes = ["nn.Dropout(0.3)", "nn.Dropout(0.5, inplace=True)", "nn.Dropout2d(0.3)", "nn.Dropout(0.0)", "nn.AlphaDropout(0.3)", "nn.Dropout(1.0)", "nn.FeatureAlphaDropout(0.3)", "nn.Dropout2d(0.3, inplace=True)"]
        make = w.one(*may_be_in_loops(w, makes))
        define(w, f"{module(w, 'drop', make)}({v.name})", v.shape)
    else:
        define(w, w.one(*may_be_in_loops(w, DROPOUTS)).format(v=v.name), v.shape)


def may_be_in_loops(w, dropouts):
    """Without p = 0 and p = 1 in a loop, of whose rounds TorchScript leaves some out: docs/troubleshooting.md."""
    return [d for d in dropouts if not w.loops or not re.search(r"\b[01]\.0\b", d)]


# --- layers ----------------------------------------------------------------------------------------------------------


def channels(w):
    return w.p.main[1]


def conv(w, v: str) -> str:
    """An expression that keeps the image's shape."""
    c, bias = channels(w), w.one("True", "False")
    k = w.p.rng.random()
    if k < 0.6:
        make = w.one(f"nn.Conv2d({c}, {c}, 3, padding=1, bias={bias})", f"nn.Conv2d({c}, {c}, 1, bias={bias})", f"nn.Conv2d({c}, {c}, 3, 1, 1, groups={c}, bias={bias})",
                     f"nn.Conv2d({c}, {c}, 3, padding='same', bias={bias})", f"nn.Conv2d({c}, {c}, 3, padding=2, dilation=2, bias={bias})", f"nn.Conv2d({c}, {c}, 3, padding=1, padding_mode='reflect')",
                     f"nn.ConvTranspose2d({c}, {c}, 3, padding=1, bias={bias})", f"nn.Conv2d({c}, {c}, (1, 3), padding=(0, 1))", f"nn.Conv2d({c}, {c}, 3, padding=1, padding_mode='circular', bias={bias})",
                     f"nn.Conv2d({c}, {c}, 3, 1, 1, groups=2)", f"nn.Conv2d({c}, {c}, 3, padding=1, padding_mode='replicate')")
        return f"{module(w, 'conv', make)}({v})"
    if k < 0.8:
        weight = parameter(w, (c, c, 3, 3))
        bias = ", " + parameter(w, (c,)) if w.chance(0.5) else ""
        return w.one(f"F.conv2d({v}, {weight}{bias}{'' if bias else ', None'}, 1, 1)", f"torch.conv2d({v}, {weight}, padding=1)", f"F.conv2d({v}, {weight}{bias}, padding=1)",
                     f"F.conv_transpose2d({v}, {weight}, padding=1)", f"F.conv2d({v}, {weight} * 0.5, padding=1)", f"F.conv2d({v}, {weight}, padding='same')")
    n, c, h, wd = w.p.main
    make = w.one(f"nn.Conv1d({c}, {c}, 3, padding=1)", f"nn.Conv3d(1, 1, 3, padding=1)", f"nn.Linear({wd}, {wd})", f"nn.Linear({wd}, {wd}, bias=False)", f"nn.Bilinear({wd}, {wd}, {wd})")
    m = module(w, "conv", make)
    if "1d" in make:
        return f"{m}({v}.flatten(2)).view({v}.size(0), {c}, {h}, {wd})"
    if "3d" in make:
        return f"{m}({v}.unsqueeze(1)).squeeze(1)"
    if "Bilinear" in make:
        return f"{m}({v}, {v})"
    return f"{m}({v})"


def norm(w, v: str) -> str:
    n, c, h, wd = w.p.main
    k = w.p.rng.random()
    if k < 0.55:
        make = w.one(f"nn.BatchNorm2d({c})", f"nn.BatchNorm2d({c})", f"nn.BatchNorm2d({c}, affine=False)", f"nn.BatchNorm2d({c}, track_running_stats=False)", f"nn.BatchNorm2d({c}, momentum=None)",
                     f"nn.BatchNorm2d({c}, eps=0.001, momentum=0.01)")
        return f"{module(w, 'bn', make)}({v})"
    if k < 0.75:
        make = w.one(f"nn.GroupNorm(2, {c})", f"nn.GroupNorm(1, {c}, affine=False)", f"nn.InstanceNorm2d({c})", f"nn.InstanceNorm2d({c}, affine=True)", f"nn.InstanceNorm2d({c}, affine=True, track_running_stats=True)",
                     f"nn.LayerNorm({wd})", f"nn.LayerNorm([{c}, {h}, {wd}])", f"nn.LayerNorm({wd}, elementwise_affine=False)", f"nn.LocalResponseNorm(2)")
        return f"{module(w, 'norm', make)}({v})"
    if k < 0.85:
        # A norm in evaluation shares its statistics with none in training: of one whose statistics change before backward PyTorch's gradient is wrong (docs/troubleshooting.md).
        training = w.one("self.training", "True", "False")
        mean, var = (module(w, "buf", f"nn.Buffer(torch.{x}({c}))" + {"self.training": "", "True": "  # in training", "False": "  # in evaluation"}[training]) for x in ("zeros", "ones"))
        g, b = (parameter(w, (c,)) for _ in range(2))
        return w.one(f"F.batch_norm({v}, {mean}, {var}, {g}, {b}, {training})", f"F.batch_norm({v}, {mean}, {var}, None, None, {training}, 0.2)", f"F.batch_norm({v}, None, None, {g}, {b}, True)",
                     f"torch.batch_norm({v}, {g}, {b}, {mean}, {var}, {training}, 0.1, 1e-5, False)", f"F.instance_norm({v})", f"F.batch_norm({v}, {mean}, {var}, {g}, {b}, {training}) * 0.5")
    if k < 0.93:
        return w.one(f"F.layer_norm({v}, [{wd}])", f"F.group_norm({v}, 2)", f"F.layer_norm({v}, [{h}, {wd}], {parameter(w, (h, wd))})", f"F.instance_norm({v}, use_input_stats=True)")
    make = f"nn.LayerNorm({c})"
    return f"{module(w, 'norm', make)}({v}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"


def act(w, v: str) -> str:
    return w.one(*(ACTIVATIONS + IN_PLACE[:24] + IN_PLACE[:8])).format(v=v)


def s_conv(w):
    v = image(w)
    if v:
        define(w, conv(w, v.name), v.shape)


def s_norm(w):
    v = image(w)
    if v:
        define(w, norm(w, v.name), v.shape)


def s_conv_norm_act(w):
    """A chain as networks write it: on one line, or over several."""
    v = image(w)
    if not v:
        return
    if w.chance(0.2):
        c = channels(w)
        layers = [f"nn.Conv2d({c}, {c}, 3, padding=1, bias=False)", f"nn.BatchNorm2d({c})", w.one("nn.ReLU(True)", "nn.ReLU()", "nn.SiLU()", "nn.Hardswish(True)", "nn.Sigmoid()", "nn.GELU()", "nn.LeakyReLU(0.25, True)")]
        if w.chance(0.3):
            layers.append(w.one("nn.MaxPool2d(3, 1, 1)", "nn.Dropout(0.3)", "nn.Identity()", "nn.AvgPool2d(3, 1, 1)"))
        if w.chance(0.2):
            layers = layers[1:]
        define(w, f"{module(w, 'seq', 'nn.Sequential(' + ', '.join(layers) + ')')}({v.name})", v.shape)
        return
    y = define(w, conv(w, v.name), v.shape) if w.chance(0.8) else v
    y = define(w, norm(w, y.name), v.shape)
    z = define(w, act(w, y.name), v.shape)
    k = w.p.rng.random()
    if k < 0.15:
        define(w, pool(w, z.name), v.shape)
    elif k < 0.3:
        r = pick(w, v.shape)
        define(w, w.one("{z} * {r}", "{r} * {z}", "{z} + {r}", "{z}.mul({r})").format(z=z.name, r=r.name), v.shape)


def s_residual(w):
    v = image(w)
    if not v:
        return
    identity = v.name
    if w.chance(0.5):
        identity = define(w, w.one("{v}", "{v}", "{v}.clone()", "{v} * 1.0", "{v}.detach()").format(v=v.name), v.shape).name
    y = define(w, conv(w, v.name), v.shape)
    y = define(w, norm(w, y.name), v.shape)
    k = w.p.rng.random()
    if k < 0.35:
        w.put(w.one(f"{y.name} += {identity}", f"{y.name}.add_({identity})"))
    else:
        y = define(w, w.one(f"{y.name} + {identity}", f"{identity} + {y.name}", f"torch.add({y.name}, {identity})", f"{y.name}.add({identity})"), v.shape)
    if w.chance(0.8):
        define(w, act(w, y.name), v.shape)


def s_squeeze_excite(w):
    v = image(w)
    if not v:
        return
    n, c, h, wd = w.p.main
    s = w.one(f"{v.name}.mean([2, 3], keepdim=True)", f"F.adaptive_avg_pool2d({v.name}, 1)", f"{module(w, 'pool', 'nn.AdaptiveAvgPool2d(1)')}({v.name})", f"F.adaptive_max_pool2d({v.name}, 1)",
              f"F.avg_pool2d({v.name}, {h})", f"torch.mean({v.name}, (2, 3), True)")
    s = define(w, s, (n, c, 1, 1))
    s = define(w, f"{module(w, 'fc', f'nn.Conv2d({c}, {c}, 1)')}({s.name})", (n, c, 1, 1))
    gate = w.one("torch.sigmoid({s})", "{s}.sigmoid()", "F.hardsigmoid({s})", "{s}.sigmoid_()", "F.hardsigmoid({s}, inplace=True)", "F.silu({s})").format(s=s.name)
    define(w, w.one(f"{v.name} * {gate}", f"{gate} * {v.name}", f"{v.name}.mul({gate})", f"{v.name} * {gate}.expand_as({v.name})"), v.shape)


def pool(w, v: str) -> str:
    n, c, h, wd = w.p.main
    return w.one(f"F.max_pool2d({v}, 3, 1, 1)", f"F.max_pool2d({v}, kernel_size=3, stride=1, padding=1)", f"F.max_pool2d({v}, 3, 1, 2, dilation=2)", f"F.avg_pool2d({v}, 3, 1, 1)", f"F.avg_pool2d({v}, 3, 1, 1, False, False)",
                 f"torch.max_pool2d({v}, [3, 3], [1, 1], [1, 1])", f"F.max_pool2d({v}, 3, 1, 1, return_indices=True)[0]", f"F.interpolate(F.max_pool2d({v}, 2), scale_factor=2.0)", f"F.adaptive_avg_pool2d({v}, [{h}, {wd}])",
                 f"F.interpolate(F.avg_pool2d({v}, 2), size=[{h}, {wd}], mode='bilinear', align_corners=False)", f"F.adaptive_max_pool2d({v}, [{h}, {wd}])", f"F.pad({v}, [1, 1, 1, 1])[:, :, 1:-1, 1:-1]",
                 f"F.avg_pool2d(F.pad({v}, [1, 1, 1, 1], mode='reflect'), 3, 1)", f"F.max_pool2d(F.pad({v}, [1, 1, 1, 1], mode='replicate'), 3, 1)", f"F.max_pool3d({v}, 3, 1, 1)", f"F.max_pool1d({v}.flatten(1, 2), 3, 1, 1).view({v}.size())",
                 f"{module(w, 'pool', 'nn.MaxPool2d(3, 1, 1)')}({v})", f"{module(w, 'pool', 'nn.AvgPool2d(3, 1, 1)')}({v})", f"F.lp_pool2d({v}.abs() + 0.1, 2.0, 1)", f"F.pixel_shuffle(F.pixel_unshuffle({v}, 2), 2)",
                 f"F.adaptive_max_pool2d({v}, [{h}, {wd}], return_indices=True)[0]", f"F.avg_pool3d({v}.unsqueeze(1), 3, 1, 1).squeeze(1)", f"F.interpolate({v}, scale_factor=1.0, mode='nearest')")


def s_pool(w):
    v = image(w)
    if v:
        define(w, pool(w, v.name), v.shape)


def s_cat(w):
    v = image(w)
    if not v:
        return
    n, c, h, wd = w.p.main
    parts = [v] + [pick(w, v.shape) for _ in range(w.one(1, 1, 2))]
    joined = define(w, w.one("torch.cat([{0}], 1)", "torch.cat(({0}), dim=1)", "torch.cat([{0}], dim=1)", "torch.concat([{0}], 1)").format(", ".join(p.name for p in parts)), (n, c * len(parts), h, wd))
    k = w.p.rng.random()
    if k < 0.5:
        define(w, f"{module(w, 'conv', f'nn.Conv2d({c * len(parts)}, {c}, 1)')}({joined.name})", v.shape)
    elif k < 0.65:
        define(w, f"{module(w, 'bn', f'nn.BatchNorm2d({c * len(parts)})')}({joined.name})[:, :{c}]", v.shape)
    elif k < 0.8:
        a, b = fresh(w), fresh(w)
        w.put(f"{a}, {b} = " + w.one(f"{joined.name}[:, :{c}], {joined.name}[:, {c}:{2 * c}]", f"{joined.name}.split({c}, 1)[0], {joined.name}.split({c}, 1)[1]", f"{joined.name}.narrow(1, 0, {c}), {joined.name}.narrow(1, {c}, {c})"))
        w.env += [Var(a, v.shape), Var(b, v.shape)]
    else:
        half = define(w, f"torch.cat([{v.name}[:, {c // 2}:], {v.name}[:, :{c // 2}]], 1)", v.shape)
        if w.chance(0.5):
            define(w, act(w, half.name), v.shape)


def recurrent(w, s):
    """A recurrent network over rows, its output as wide as they are."""
    n, t, d = s.shape
    cell, both, layers = w.one("LSTM", "LSTM", "GRU", "GRU", "RNN", "RELU"), w.chance(0.3), w.one(1, 1, 2)
    hidden = d // 2 if both else d
    rest = ", nonlinearity='relu'" if cell == "RELU" else f", proj_size={hidden}" if cell == "LSTM" and w.chance(0.15) else ""
    own = hidden + 1 if "proj" in rest else hidden
    dropout = w.one(0.0, 0.3) if layers == 2 else 0.0
    m = module(w, "rnn", f"nn.{'RNN' if cell == 'RELU' else cell}({d}, {own}, {layers}, bias={w.one('True', 'True', 'False')}, batch_first=True, dropout={dropout}, bidirectional={both}{rest})")
    h = fresh(w)
    if cell == "LSTM" or w.chance(0.4):
        out = define(w, f"{m}({s.name})[0]", s.shape)
    else:
        state = w.one("", f", torch.zeros({layers * (1 + both)}, {n}, {hidden}, dtype={s.name}.dtype)", f", {s.name}[:, :1, :{hidden}].transpose(0, 1).expand({layers * (1 + both)}, -1, -1).contiguous()")
        out = Var(fresh(w), s.shape)
        w.put(f"{out.name}, {h} = {m}({s.name}{state})")
        w.env.append(out)
        if w.chance(0.5):
            w.put(w.one("{h}.mul_(0.5)", "{h} = {h} * 0.5", "{h}.relu_()").format(h=h))
            out = define(w, f"{out.name} + {h}.mean((0, 2)).view({n}, 1, 1)", s.shape)
    return out


def s_sequence(w):
    """To rows and back: linear layers, attention, matrix products, softmax, layer norms."""
    v = image(w)
    if not v:
        return
    n, c, h, wd = w.p.main
    t, d = h * wd, c
    rows = w.one(f"{v.name}.flatten(2).transpose(1, 2)", f"{v.name}.permute(0, 2, 3, 1).reshape({n}, {t}, {d})", f"{v.name}.view({n}, {d}, {t}).permute(0, 2, 1)", f"{v.name}.permute(0, 2, 3, 1).contiguous().view({n}, {t}, {d})",
                 f"{v.name}.reshape({n}, {t}, {d})", f"{v.name}.view({n}, {t}, {d})")
    s = define(w, rows, (n, t, d))
    for _ in range(w.one(1, 1, 2, 3)):
        k = w.p.rng.random()
        if k < 0.12:
            s = recurrent(w, s)
        elif k < 0.2:
            s = define(w, w.one(f"{module(w, 'norm', f'nn.LayerNorm({d})')}({s.name})", f"F.rms_norm({s.name}, [{d}], {parameter(w, (d,))}, 0.01)", f"F.layer_norm({s.name}, [{d}])"), s.shape)
        elif k < 0.45:
            s = define(w, w.one(f"{module(w, 'fc', f'nn.Linear({d}, {d})')}({s.name})", f"F.linear({s.name}, {parameter(w, (d, d))})", f"{s.name} @ {parameter(w, (d, d))}", f"torch.matmul({s.name}, {parameter(w, (d, d))}.t())",
                                f"F.linear({s.name}, {parameter(w, (d, d))}, {parameter(w, (d,))})"), s.shape)
        elif k < 0.6:
            q = define(w, f"{module(w, 'fc', f'nn.Linear({d}, {3 * d})')}({s.name})", (n, t, 3 * d))
            a, b, e = fresh(w), fresh(w), fresh(w)
            w.put(f"{a}, {b}, {e} = {q.name}.chunk(3, -1)" if w.chance(0.6) else f"{a}, {b}, {e} = {q.name}[..., :{d}], {q.name}[..., {d}:{2 * d}], {q.name}[..., {2 * d}:]")
            w.env += [Var(x, s.shape) for x in (a, b, e)]
            heads = lambda x: f"{x}.view({n}, {t}, 2, {d // 2}).transpose(1, 2)"
            s = define(w, w.one(f"F.scaled_dot_product_attention({a}, {b}, {e})", f"F.scaled_dot_product_attention({heads(a)}, {heads(b)}, {heads(e)}).transpose(1, 2).reshape({n}, {t}, {d})",
                                f"torch.softmax({a} @ {b}.transpose(1, 2) * 0.5, dim=-1) @ {e}", f"torch.bmm(F.softmax(torch.bmm({a}, {b}.transpose(-2, -1)), -1), {e})",
                                f"F.scaled_dot_product_attention({a}, {b}, {e}, is_causal=True)", f"F.dropout(torch.softmax({a}.matmul({b}.mT) / 2.0, -1), 0.2, self.training).matmul({e})",
                                f"F.scaled_dot_product_attention({a}, {b}, {e}, None, 0.0 if not self.training else 0.2)"), s.shape)
        elif k < 0.7:
            m = module(w, "mlp", f"nn.Sequential(nn.Linear({d}, {2 * d}), {w.one('nn.GELU()', 'nn.ReLU(True)', 'nn.SiLU()')}, nn.Dropout({0.2 if w.loops else w.one(0.0, 0.2)}), nn.Linear({2 * d}, {d}))")
            s = define(w, w.one(f"{s.name} + {m}({s.name})", f"{m}({s.name})"), s.shape)
        elif k < 0.8:
            s = define(w, w.one("F.softmax({s}, dim=-1)", "torch.softmax({s}, 1)", "{s}.softmax(-1)", "F.log_softmax({s}, dim=1)", "F.softmax({s}, dim=2, dtype={s}.dtype)", "torch.roll({s}, 1, 1)").format(s=s.name), s.shape)
        elif k < 0.9:
            s = define(w, w.one(*(ACTIVATIONS + IN_PLACE)).format(v=s.name), s.shape)
        else:
            o = pick(w, s.shape)
            s = define(w, w.one(*BINARY).format(a=s.name, b=o.name), s.shape)
    define(w, w.one(f"{s.name}.transpose(1, 2).reshape({n}, {c}, {h}, {wd})", f"{s.name}.transpose(1, 2).contiguous().view({n}, {c}, {h}, {wd})", f"{s.name}.reshape({n}, {c}, {h}, {wd})", f"{s.name}.transpose(1, 2).unflatten(2, [{h}, {wd}])",
                    f"{s.name}.contiguous().view({n}, {c}, {h}, {wd})"), v.shape)


def s_loss(w):
    """Cross entropy of logits, of rows or of a picture's points, by itself or after a linear layer; its result goes into a value."""
    v = image(w)
    if not v:
        return
    n, c, h, wd = w.p.main
    classes = c if w.chance(0.3) else w.one(5, 40, 70)
    options = w.one("", "", "", ", ignore_index=1", ", reduction='sum'", ", reduction='none'", ", label_smoothing=0.1")
    if w.chance(0.2):
        options += f", weight={module(w, 'buf', f'nn.Buffer(torch.arange(1.0, {classes + 1}.0) / {classes})')}"
    targets = lambda *shape: f"(torch.arange({' * '.join(map(str, shape))}) * 7 % {classes}).view({', '.join(map(str, shape))})"
    if classes == c and w.chance(0.4):
        l = define(w, f"F.cross_entropy({v.name}, {targets(n, h, wd)}{options})", ())
    else:
        t = h * wd
        s = define(w, w.one(f"{v.name}.flatten(2).transpose(1, 2)", f"{v.name}.permute(0, 2, 3, 1).reshape({n}, {t}, {c})"), (n, t, c))
        if classes != c or w.chance(0.5):
            weight = parameter(w, (classes, c)) if w.chance(0.4) else ""
            bias = f", {parameter(w, (classes,))}" if w.chance(0.5) else ""
            s = define(w, f"F.linear({s.name}, {weight}{bias})" if weight else f"{module(w, 'fc', f'nn.Linear({c}, {classes})')}({s.name})", (n, t, classes))
        x = s.name
        if w.chance(0.15):
            x = define(w, f"{x}.float()", s.shape).name
        if w.chance(0.3):
            x, t = define(w, w.one("{x}[:, :-1]", "{x}[:, :-1, :]", "{x}[..., :-1, :]", "{x}[:, :-1].contiguous()", "{x}[..., :-1, :].contiguous()").format(x=x), (n, t - 1, classes)).name, t - 1
        if w.chance(0.3):
            l = define(w, f"F.cross_entropy({x}{w.one('.transpose(1, 2)', '.permute(0, 2, 1)', '.mT')}, {targets(n, t)}{options})", ())
        else:
            flat = w.one(f".reshape(-1, {classes})", ".flatten(0, 1)", f".reshape({n * t}, {classes})", f".contiguous().view(-1, {classes})")
            loss = "F.nll_loss(F.log_softmax({x}, -1), {t}{o})" if "smoothing" not in options and w.chance(0.2) else "F.cross_entropy({x}, {t}{o})"
            l = define(w, loss.format(x=x + flat, t=targets(n * t), o=options), ())
    w.env.remove(l)  # of a shape that nothing else here has
    define(w, w.one("{v} + {l}.to({v}.dtype)", "{v} * (1.0 + 0.1 * {l}.to({v}.dtype))", "{v} * torch.sigmoid({l}).to({v}.dtype)").format(v=v.name, l=f"{l.name}.mean()" if "none" in options else l.name), v.shape)


def s_roll(w):
    v = image(w)
    if v:
        n, c, h, wd = w.p.main
        define(w, w.one("torch.roll({v}, [1, 1], [2, 3])", "{v}.roll(1, 1)", "{v}.permute(0, 1, 3, 2).contiguous()", "{v}.transpose(2, 3).reshape({s})", "{v}.transpose(2, 3)", "{v}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)",
                        "{v}.contiguous(memory_format=torch.channels_last)", "{v}.squeeze().view({s})", "{v}.squeeze()", "{v}.reshape(-1).view({s})", "{v}.permute(1, 0, 2, 3).reshape({s})", "{v}.flatten().reshape({s})", "{v}[:1].expand({s})",
                        "{v}[..., :1].expand({s})").format(v=v.name, s=f"{n}, {c}, {h}, {wd}"), v.shape)


def s_broadcast(w):
    v = image(w)
    if not v:
        return
    n, c, h, wd = w.p.main
    other = w.one(parameter(w, (1, c, 1, 1)), parameter(w, (c, 1, 1)), parameter(w, (wd,)), f"{v.name}[:, :1]", f"{v.name}.mean(1, keepdim=True)", f"{v.name}.amax((2, 3), keepdim=True)", f"{v.name}[:1]", parameter(w, (1, c, h, wd)))
    define(w, w.one(f"{v.name} * {other}", f"{v.name} + {other}", f"{other} * {v.name}", f"torch.sigmoid({other}) * {v.name}", f"{other} + {v.name}", f"F.silu({v.name}) * {other}", f"F.relu({v.name} + {other})"), v.shape)


# --- state, aliases, containers --------------------------------------------------------------------------------------


def s_state(w):
    v = image(w)
    if not v or w.p.how == "trace" and w.chance(0.7):
        return
    c = channels(w)
    buf = module(w, "buf", f"nn.Buffer(torch.zeros({c}))")
    k = w.p.rng.random()
    if k < 0.3:
        w.put(w.one("{b}.mul_(0.5).add_({v}.detach().mean([0, 2, 3]))", "{b} += {v}.detach().mean((0, 2, 3))", "{b}.add_(1.0)", "{b}.copy_({v}.detach()[0, :, 0, 0])", "{b} = {b} * 0.5 + {v}.detach().mean((0, 2, 3))",
                    "{b} = {v}.detach().amax((0, 2, 3))").format(b=buf, v=v.name))
        if w.chance(0.5):
            define(w, f"{v.name} + {buf}.view(1, {c}, 1, 1)", v.shape)
    elif k < 0.5:
        define(w, w.one("{v} * {b}.view(1, {c}, 1, 1)", "{v} + {b}.reshape(-1, 1, 1)").format(v=v.name, b=buf, c=c), v.shape)
    elif k < 0.75:
        if "hist: List[Tensor]" not in w.c.annotations:
            w.c.annotations.append("hist: List[Tensor]")
            w.c.init.append("self.hist = []")
        w.put(w.one("self.hist.append({v}.detach())", "self.hist.append({v}.detach().clone())", "self.hist = [{v}.detach()]", "self.hist += [{v}.detach().mean()]").format(v=v.name))
        if w.chance(0.5):
            define(w, w.one("{v} + len(self.hist)", "{v} * self.hist[-1].mean()").format(v=v.name), v.shape)
    else:
        if "count: int" not in w.c.annotations:
            w.c.annotations.append("count: int")
            w.c.init.append("self.count = 0")
        w.put("self.count += 1")
        if w.chance(0.6):
            define(w, w.one("{v} + self.count", "{v} * (1.0 + self.count)").format(v=v.name), v.shape)


def s_container(w):
    a = pick(w)
    b = pick(w, a.shape)
    name = fresh(w)
    k = w.p.rng.random()
    if k < 0.3:
        w.put(f"{name} = [{a.name}, {b.name}]")
        if w.chance(0.4):
            w.put(w.one(f"{name}.append({a.name})", f"{name}[0] = {b.name}", f"{name}.reverse()", f"{name}.insert(0, {b.name})"))
        define(w, f"{name}[{w.one(0, 1, -1)}]", a.shape)
    elif k < 0.5:
        w.put(f"{name} = ({a.name}, {b.name})")
        define(w, f"{name}[{w.one(0, 1)}]", a.shape)
    elif k < 0.7:
        w.put(f'{name} = {{"a": {a.name}, "b": {b.name}}}')
        define(w, f'{name}["{w.one("a", "b")}"]', a.shape)
    elif k < 0.85:
        w.put(f"{name}: Optional[Tensor] = {a.name}")
        o = Var(fresh(w), a.shape)
        w.put(f"{o.name} = {b.name}")
        w.put(f"if {name} is not None:")
        w.put(f"    {o.name} = {w.one('{n}', '{n} + 1.0', 'F.relu({n})').format(n=name)}")
        w.env.append(o)
    else:
        define(w, f"torch.stack([{a.name}, {b.name}], 1)[:, {w.one(0, 1)}]", a.shape)


def s_function(w):
    """A function that several callers share."""
    if w.p.functions and w.chance(0.5):
        name = w.p.rng.choice(w.p.functions)[0]
    else:
        name = f"f{len(w.p.functions)}"
        body = []
        for _ in range(w.one(1, 1, 2)):
            body.append("    " + w.one(*[f"a = {t}" for t in ACTIVATIONS[:30] + BINARY[:12] + IN_PLACE[:12] + ALIASES[:5]] + IN_PLACE_BINARY[:8]).format(v="a", a="a", b="b"))
        body.append("    return " + w.one("a", "a", "a + b", "b", "F.relu(a)", "a.view(a.size())"))
        w.p.functions.append((name, f"def {name}(a: Tensor, b: Tensor):\n" + "\n".join(body) + "\n"))
    a = image(w) or pick(w)
    b = pick(w, a.shape)
    define(w, f"{name}({a.name}, {b.name})", a.shape)


# --- control flow ----------------------------------------------------------------------------------------------------


def condition(w: Writer) -> str:
    v = pick(w)
    options = [f"{v.name}.size(0) > 1", f"{v.name}.dim() == 4", "self.training", "not self.training", f"{v.name}.shape[1] == 3", f"{v.name}.requires_grad"]
    if w.flag:
        options += ["flag", "flag", "flag", "not flag", "n > 1", "n > 2 and flag"]
    if w.p.dtype == "float64":
        options += [f"bool(({v.name}.sum() > 0.25).item())", f"float({v.name}.mean()) > 0.1"]
    return w.one(*options)


@contextlib.contextmanager
def nested(w: Writer, local: bool = True):
    w.indent, w.depth = w.indent + 1, w.depth + 1
    kept = list(w.env)
    start = len(w.lines)
    yield
    if len(w.lines) == start:
        w.put("pass")
    if local:
        w.env = kept
    w.indent, w.depth = w.indent - 1, w.depth - 1


def s_if(w):
    if w.depth >= 2:
        return
    both = w.chance(0.55)
    shapes = [v.shape for v in [image(w) or pick(w) for _ in range(w.one(1, 2, 2))]] if both else []
    outs = [Var(fresh(w), s) for s in shapes]
    w.put(f"if {condition(w)}:")
    for branch in range(2 if both or w.chance(0.4) else 1):
        if branch:
            w.put("else:")
        with nested(w):
            statements(w, w.one(0, 1, 1, 2))
            for o in outs:
                # Outputs of one branch are often the same tensor, a view of it, or one from outside.
                v = pick(w, o.shape)
                w.put(f"{o.name} = " + w.one("{v}", "{v}", "{v}", "{v}.view({v}.size())", "F.relu({v})", "{v} * 2.0", "{v}.clone()").format(v=v.name))
                if w.chance(0.4):
                    w.env.append(Var(o.name, o.shape))
            if w.in_block is False and w.flag and w.chance(0.04):
                w.put("return " + w.returns[0].format(v=pick(w, w.p.main).name) if w.returns else "pass")
    w.env += outs
    if outs and w.chance(0.5):
        v = w.p.rng.choice(outs)
        w.put(w.one(*[f"{v.name} = {t}" for t in IN_PLACE[:20]] + IN_PLACE[:30] + ["{v} += 1.0"]).format(v=v.name))


def s_loop(w):
    if w.depth >= 2:
        return
    i = f"i{w.depth}"
    k = w.p.rng.random()
    if k < 0.7 or not w.flag:
        w.put(f"for {i} in range({w.one('2', '3', 'n' if w.flag else '2', '1')}):")
    elif k < 0.85:
        w.put(f"{i} = 0")
        w.put(f"while {i} < n:")
    else:
        a = pick(w)
        b = pick(w, a.shape)
        item = Var(fresh(w), a.shape)
        w.put(f"for {item.name} in [{a.name}, {b.name}]:")
        w.loops += 1
        with nested(w):
            w.env.append(item)
            statements(w, w.one(1, 2))
            carry = pick(w, a.shape)
            w.put(f"{b.name} = {carry.name} + {item.name}")
        w.loops -= 1
        return
    w.loops += 1
    with nested(w):
        statements(w, w.one(1, 1, 2))
        outer = [v for v in w.env]
        v = image(w) or pick(w)
        inside = pick(w, v.shape)
        if v in outer and w.chance(0.8):
            w.put(f"{v.name} = " + w.one("{i}", "{i} * 0.5", "F.relu({i})", "{i} + {v}", "{i}.view({i}.size())").format(i=inside.name, v=v.name))
        if 0.7 <= k < 0.85 and w.flag:
            w.put(f"{i} += 1")
    w.loops -= 1


def s_no_grad(w):
    w.put(w.one("with torch.no_grad():", "with torch.no_grad():", "with torch.enable_grad():"))
    with nested(w, local=False):
        statements(w, w.one(1, 2))


def s_autocast(w):
    if w.p.dtype == "bfloat16" and w.chance(0.7):
        return
    w.put(w.one('with torch.autocast("cpu", dtype=torch.bfloat16):', 'with torch.autocast("cpu", dtype=torch.bfloat16):', 'with torch.autocast("cpu", enabled=False):', 'with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):'))
    with nested(w, local=False):
        statements(w, w.one(1, 2, 3))


# --- modules of the program's own ------------------------------------------------------------------------------------


def finish_class(c: Class, text_methods: List[str]) -> str:
    lines = [f"class {c.name}(nn.Module):"]
    lines += [f"    {a}" for a in c.annotations]
    lines += ["    def __init__(self):", "        super().__init__()"] + [f"        {line}" for line in c.init]
    return "\n".join(lines + text_methods) + "\n"


def write_block(p: Program) -> Block:
    rng = p.rng
    block = Block(f"B{len(p.blocks)}", [p.main] * rng.choice([1, 1, 1, 2]), [], rng.random() < 0.2)
    c = Class(block.name)
    arguments = [Var(n, s, True) for n, s in zip("xy", block.takes)]
    w = Writer(p, c, list(arguments), flag=block.flag, in_block=True, names=0)
    k = rng.random()
    if k < 0.12:  # the argument itself, or a view of it
        returned = [rng.choice(["x", "x", "x.view(x.size())", "x[:]", "x.detach()", "x.transpose(2, 3)"])]
    else:
        statements(w, rng.choice([1, 2, 2, 3]))
        returned = [pick(w, p.main).name]
        if rng.random() < 0.3:
            v = pick(w, p.main).name
            returned.append(rng.choice([v, v, returned[0], f"{returned[0]}.view({v}.size())", "x", f"{v}[:]"]))
        elif rng.random() < 0.15:
            returned = [f"{returned[0]}.view({returned[0]}.size())"]
    block.gives = [p.main] * len(returned)
    head = f"    def forward(self, {', '.join(a.name + ': Tensor' for a in arguments)}{', flag: bool, n: int' if block.flag else ''}):"
    p.classes.append(finish_class(c, [head] + w.lines + [f"        return {', '.join(returned)}"]))
    p.blocks.append(block)
    return block


def s_block(w):
    if not image(w):
        return
    if not w.in_block and len(w.p.blocks) < 3 and (not w.p.blocks or w.chance(0.5)):
        block = write_block(w.p)
    elif w.in_block:
        return
    else:
        block = w.p.rng.choice(w.p.blocks)
    if block.flag and not w.flag:
        return
    known = w.c.modules.setdefault(block.name, [])
    if known and w.chance(0.5):
        m = w.p.rng.choice(known)
    else:
        m = "self." + number(w, "b")
        w.c.init.append(f"{m} = {block.name}()")
        known.append(m)
    call = f"{m}({', '.join(image(w).name for _ in block.takes)}{', flag, n' if block.flag else ''})"
    if len(block.gives) == 1:
        define(w, call, block.gives[0])
    else:
        names = [fresh(w) for _ in block.gives]
        w.put(f"{', '.join(names)} = {call}")
        w.env += [Var(n, s) for n, s in zip(names, block.gives)]


def s_module_list(w):
    v = image(w)
    if not v or w.depth > 0:
        return
    c = channels(w)
    one = w.one(f"nn.Conv2d({c}, {c}, 3, padding=1)", f"nn.Sequential(nn.BatchNorm2d({c}), nn.ReLU(True), nn.Conv2d({c}, {c}, 1))", f"nn.Sequential(nn.Conv2d({c}, {c}, 1), nn.BatchNorm2d({c}))", "nn.Dropout(0.3)")
    m = module(w, "list", f"nn.ModuleList([{one} for _ in range(2)])")
    y = Var(fresh(w), v.shape)
    w.put(f"{y.name} = {v.name}")
    w.env.append(y)
    w.put(f"for layer in {m}:")
    with nested(w):
        w.put(f"{y.name} = " + w.one("layer({y})", "{y} + layer({y})", "F.relu(layer({y}))", "F.relu(layer({y}), inplace=True)").format(y=y.name))


STATEMENTS = [
    (s_activation, 10), (s_activation_module, 6), (s_in_place, 9), (s_arithmetic, 8), (s_alias, 8), (s_binary, 9), (s_in_place_binary, 8), (s_dropout, 5), (s_conv, 8), (s_norm, 5), (s_conv_norm_act, 9), (s_residual, 6),
    (s_squeeze_excite, 3), (s_pool, 5), (s_cat, 4), (s_sequence, 5), (s_loss, 2), (s_roll, 3), (s_broadcast, 4), (s_state, 3), (s_container, 3), (s_function, 4), (s_if, 7), (s_loop, 4), (s_no_grad, 3), (s_autocast, 2), (s_block, 8), (s_module_list, 2),
]


def statements(w: Writer, count: int) -> None:
    for _ in range(count):
        w.p.rng.choices([s for s, _ in STATEMENTS], [weight for _, weight in STATEMENTS])[0](w)


def program(seed: int, attempt: int = 0) -> str:
    """The source of program `seed`: classes, and CONFIG, which says how P is called. Not all can be run: then the next attempt is taken."""
    rng = random.Random(f"tsmem {seed} {attempt}")
    dtype = rng.choices(["float64", "float32", "bfloat16"], [6, 3, 1])[0]
    how = "trace" if rng.random() < 0.12 else "script"
    main = rng.choice([(2, 4, 8, 8), (2, 4, 12, 12), (3, 4, 8, 8), (2, 8, 8, 8)] if dtype == "float64" else [(2, 8, 12, 12), (2, 4, 12, 12)])
    p = Program(rng, main, dtype, how)
    c = Class("P")
    w = Writer(p, c, [Var("x", main, True), Var("y", main, True)], flag=True)
    single = rng.random() < 0.3
    w.returns = ["{v}"] if single else []
    statements(w, rng.choice([2, 3, 4, 4, 5, 6, 7, 9, 12]))
    if rng.random() < 0.08 and len(c.modules.get(f"nn.Conv2d({main[1]}, {main[1]}, 1, bias=True)", [])) > 1:
        a, b = c.modules[f"nn.Conv2d({main[1]}, {main[1]}, 1, bias=True)"][:2]
        c.init.append(f"{a}.weight = {b}.weight")
    images = [v.name for v in w.env if v.shape == main]
    everything = [v.name for v in w.env]
    if single:
        returned = images[-1]
    else:
        names = [images[-1]] + [rng.choice(everything) for _ in range(rng.choice([1, 1, 2, 3]))]
        returned = rng.choice([", ".join(names), ", ".join(names), "[" + ", ".join(names) + "]", "{" + ", ".join(f'"{k}": {v}' for k, v in zip("abcd", names)) + "}"])
    methods = [f"    def forward(self, x: Tensor, y: Tensor, flag: bool = True, n: int = 2):"] + w.lines + [f"        return {returned}"]
    called = "forward"
    if how == "script" and rng.random() < 0.08:  # another method, called by forward or by itself
        e = Writer(p, c, [Var("x", main, True)], in_block=True)
        statements(e, rng.choice([1, 2, 3]))
        methods += ["    @torch.jit.export", "    def other(self, x: Tensor):"] + e.lines + [f"        return {pick(e, main).name}"]
        if rng.random() < 0.5:
            methods[1:1] = [f"        {rng.choice(['x', 'y'])} = self.other({rng.choice(['x', 'y'])})"]
        else:
            called = "other"
    p.classes.append(finish_class(c, methods))
    parameters = rng.random()
    frozen = "all" if parameters < 0.06 else rng.choice(["conv", "bn", "w", "fc", "b0", "rnn"]) if parameters < 0.3 else ""
    train = rng.choice([True, True, True, False])
    calls = [(train, bool(i % 2 == 0), rng.choice([1, 2, 2, 3]), True) for i in range(4)] if rng.random() < 0.5 else [(train, True, 2, True)] * 4
    if rng.random() < 0.12:
        calls[rng.randrange(4)] = (not train, True, 2, True)
    if rng.random() < 0.12:
        calls[rng.randrange(4)] = (train, True, 2, False)
    config = {
        "dtype": dtype, "how": how, "shape": main, "inputs": [rng.choice(["leaf", "made", "made", "plain"]), rng.choice(["leaf", "made", "plain"])],
        "layout": rng.choice(["contiguous"] * 4 + ["channels_last"]), "frozen": frozen, "freeze_after": rng.random() < 0.5, "method": called, "calls": calls,
        "autocast": how != "none" and dtype == "float32" and rng.random() < 0.12, "backward": rng.choice(["once"] * 6 + ["retain", "outputs", "grad", "two calls", "two calls"]),
    }
    text = HEAD + "\n" + "\n".join(source + "" for _, source in p.functions) + ("\n" if p.functions else "") + "\n".join(p.classes)
    return text + "\nCONFIG = dict(" + ", ".join(f"{k}={v!r}" for k, v in config.items()) + ")\n"


if __name__ == "__main__":
    import sys
    print(program(*map(int, sys.argv[1:])))
