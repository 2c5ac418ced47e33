"""Each pattern from a user's side: rewritten by the command line, loaded in Python, same numbers, fewer bytes alive after forward."""
import os
import subprocess
import time

import allocator
import pytest
import torch
from torch import nn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TSMEM = os.environ.get("TSMEM_BIN", os.path.join(ROOT, "build", "bin", "tsmem"))


class Residual(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), act

    def forward(self, x):
        return self.act(self.bn(self.conv(x)) + x)


class SqueezeExcite(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), act
        self.fc = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        z = self.act(self.bn(self.conv(x)))
        return z * torch.sigmoid(self.fc(z.mean([2, 3], keepdim=True)))


class NewGelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class Conv1d(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(x.size(0), x.size(1), x.size(2), self.weight.size(1))


class Experts(nn.Module):
    """A mixture of gated experts over an image's rows, one a row."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(32), nn.Linear(32, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 128) / 6), nn.Parameter(torch.randn(4, 64, 32) / 8)

    def forward(self, x):
        rows = self.norm(x).view(-1, 32)
        share, expert = self.router(rows).softmax(-1).max(-1)
        expert, order = expert.sort(stable=True)
        ends = (expert.unsqueeze(1) == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        gate, value = torch._grouped_mm(rows[order], self.up, ends).chunk(2, -1)
        given = torch._grouped_mm(torch.nn.functional.silu(gate) * value, self.down, ends) * share[order].unsqueeze(1)
        return x + torch.zeros_like(rows).index_copy(0, order, given).view(x.shape)


class Heads(nn.Module):
    """Attention over an image's rows, with dropout."""

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x * 1, x, None, 0.1) + x


class Tensordot(nn.Module):
    """Channels mixed behind their activation, as networks that know of rotations do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        return torch.tensordot(x.sigmoid() * x.tanh(), self.weight, dims=([1], [0])).permute(0, 3, 1, 2)


class Einsum(nn.Module):
    """Attention over an image's rows, its products spelled by their subscripts."""

    def __init__(self):
        super().__init__()
        self.norm, self.query_key_value = nn.LayerNorm(32), nn.Linear(32, 3 * 128)

    def forward(self, x):
        query, key, value = self.query_key_value(self.norm(x)).chunk(3, -1)
        shares = (torch.einsum("bcid,bcjd->bcij", [query, key]) * 0.1).softmax(-1)
        return x + torch.einsum("bcij,bcjd->bcid", [shares, value])[..., :32]


def conv_bn(act, bias=False):
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8), act)


class ComposedNorm(nn.Module):
    """A norm over channels written out, as ConvTasNet and RMSNorm are."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale, self.shift = nn.Conv2d(8, 8, 3, padding=1), nn.Parameter(torch.rand(8, 1, 1)), nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x):
        y = torch.relu(self.conv(x))
        d = y - y.mean(1, keepdim=True)
        z = self.scale * d / torch.sqrt(torch.pow(d, 2).mean(1, keepdim=True) + 1e-5) + self.shift
        return z.masked_fill(z > 3, 0.25) / 2


class Normalized(nn.Module):
    """A convolution's output keeps the division by its length, and the products by each other their factors; what is made of them is not kept."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5)

    def forward(self, x):
        y = nn.functional.normalize(self.conv(x), dim=1) * self.scale
        return self.out(y * (self.conv(x) * self.gate(x)))


class Gated(nn.Module):
    """A gate of what is made again keeps nothing."""

    def __init__(self):
        super().__init__()
        self.norm, self.make, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.norm(self.make(x))
        return self.out(torch.tanh(y) * torch.sigmoid(y))


class Windows(nn.Module):
    """Attention within windows: images, heads, windows, rows, features of a head."""

    def __init__(self):
        super().__init__()
        self.make, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.make(x).reshape(8, 8, 32, 3, 2, 16).permute(3, 0, 4, 1, 2, 5).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.permute(0, 2, 3, 1, 4).reshape(8, 8, 32, 32))


class Stacked(nn.Module):
    """Lists of tensors put together, and pads one behind the other."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.mix = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        x = nn.functional.pad(nn.functional.pad(x, [1, 1, 0, 0], mode="reflect"), [0, 0, 1, 1])
        x = self.norm(self.conv(x)).relu()
        return self.mix(torch.stack([torch.sin(x), torch.lerp(x, torch.cos(x), 0.25)], 2).flatten(1, 2))


class Upsampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        y = nn.functional.interpolate(torch.relu(self.conv(x)), scale_factor=2.0)
        return nn.functional.avg_pool2d(self.conv(y), 2)


class Segmentation(nn.Module):
    """Its loss included: classes of pixels, predicted at a quarter of the size."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        logits = nn.functional.interpolate(self.conv(nn.functional.avg_pool2d(x, 4)), scale_factor=4.0, mode="bilinear")
        return nn.functional.cross_entropy(logits, x.argmax(1), reduction="none")


class Words(nn.Module):
    """A language model's last layer and its loss: pixels are words, and each guesses the next."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 100)

    def forward(self, x):
        logits = self.head(x.flatten(2).transpose(1, 2))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x.abs().sum(1).flatten(1)[:, 1:].flatten().long())


class Recurrent(nn.Module):
    """An image's rows, one after the other. The first state is made from them: a traced default one has float32 for ever."""

    def __init__(self, net):
        super().__init__()
        self.net, self.states = net, net.num_layers * (2 if net.bidirectional else 1)

    def first(self, x):
        return 0 * x[:, 0, : self.states, :24].transpose(0, 1)

    def forward(self, x):
        return self.net(x.flatten(1, 2), self.first(x))[0]


class RecurrentWithCell(Recurrent):
    def forward(self, x):
        return self.net(x.flatten(1, 2), (self.first(x), self.first(x)))[0]


class Frequencies(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self):
        super().__init__()
        self.conv, self.low = nn.Conv2d(8, 8, 1), nn.Parameter(0.1 * torch.randn(8, 8, 8, 8, 2))

    def forward(self, x):
        f = torch.fft.rfft2(x, norm="ortho")
        low = torch.einsum("bixy,ioxy->boxy", f[:, :, :8, :8].contiguous(), torch.view_as_complex(self.low))
        return nn.functional.gelu(torch.fft.irfft2(nn.functional.pad(low, (0, 9, 0, 24)), (32, 32), norm="ortho") + self.conv(x))


class Skip(nn.Module):
    """A level of pix2pix's U-Net: its first layer overwrites the argument that is put beside the last one's result."""

    def __init__(self, inner=None, outermost=False):
        super().__init__()
        inside = [nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)]
        if inner:
            inside += [inner, nn.ReLU(inplace=True), nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Dropout(0.25)]
        self.inside, self.outermost = nn.Sequential(*inside), outermost

    def forward(self, x):
        y = self.inside(x)
        return y if self.outermost else torch.cat([x, y], 1)


def two(layer):
    return nn.Sequential(layer(), layer())


MODELS = {
    "bn-act": lambda: two(lambda: conv_bn(nn.ReLU(inplace=True))),
    "bn-act silu": lambda: two(lambda: conv_bn(nn.SiLU(inplace=True))),
    "bn-act hardswish": lambda: two(lambda: conv_bn(nn.Hardswish(inplace=True))),
    "bn-act leaky": lambda: two(lambda: conv_bn(nn.LeakyReLU(0.1, inplace=True), bias=True)),
    "bn-add-act": lambda: two(lambda: Residual(nn.ReLU(inplace=True))),
    "bn-add-act gelu": lambda: two(lambda: Residual(nn.GELU())),
    "bn-act-mul": lambda: two(lambda: SqueezeExcite(nn.SiLU())),
    "bn-act-max-pool": lambda: nn.Sequential(conv_bn(nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1), conv_bn(nn.ReLU())),
    "activation": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU6(inplace=True), nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.1, inplace=True)),
    "activation of a skip connection": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), Skip(Skip(Skip()), outermost=True)),
    "max-pool": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)),
    "shape-only": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)),
    "shape-only pads": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.ReplicationPad2d(2),
                                             nn.Conv2d(8, 8, 3, padding=2, padding_mode="replicate"), nn.ReflectionPad2d((1, 2, 3, 0)), nn.Conv2d(8, 8, 3)),
    "shape-only transforms": lambda: two(Frequencies),
    "pointwise": lambda: two(ComposedNorm),
    "pointwise lists": lambda: two(Stacked),
    "pointwise of what is kept": lambda: two(Normalized),
    "lookup": lambda: two(Upsampled),
    "prelu": lambda: two(lambda: conv_bn(nn.PReLU(8))),
    "prelu instance": lambda: two(lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.PReLU())),
    "rrelu": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.RReLU(), nn.Conv2d(8, 8, 3), nn.RReLU()),
    "glu": lambda: two(lambda: nn.Sequential(nn.Conv2d(8, 16, 1), nn.GLU(1))),
    "dropout": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.Dropout(0.3), nn.Conv2d(8, 8, 3), nn.Dropout2d(0.2)),
    "addmm": lambda: two(lambda: nn.Sequential(nn.LayerNorm(32), Conv1d(32, 32))),
    "einsum": lambda: two(Einsum),
    "einsum tensordot": lambda: two(Tensordot),
    "composed-activation": lambda: two(lambda: nn.Sequential(Conv1d(32, 32), NewGelu())),
    "rms-norm": lambda: two(lambda: nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32))),
    "rnn lstm": lambda: RecurrentWithCell(nn.LSTM(32, 24, 2, batch_first=True, dropout=0.2, bidirectional=True)),
    "rnn gru": lambda: Recurrent(nn.GRU(32, 24, 2, batch_first=True)),
    "rnn tanh": lambda: Recurrent(nn.RNN(32, 24, 2, batch_first=True)),
    "cross-entropy": Segmentation,
    "linear-cross-entropy": Words,
    "attention with dropout": lambda: two(lambda: nn.Sequential(nn.Linear(32, 32), Heads())),
    "pointwise gates": lambda: two(Gated),
    "attention in windows": lambda: two(Windows),
}
# Bytes alive after forward, rewritten to original, at most: with everything trainable, and with everything frozen but the input.
LIMITS = {
    "bn-act": (1.01, 0.68), "bn-act silu": (0.72, 0.45), "bn-act hardswish": (0.72, 0.45), "bn-act leaky": (1.01, 0.68), "bn-add-act": (1.05, 0.70),
    "bn-add-act gelu": (1.05, 0.72), "bn-act-mul": (0.72, 0.45), "bn-act-max-pool": (0.75, 0.55), "activation": (0.70, 0.10),
    "activation of a skip connection": (0.47, 0.45), "max-pool": (0.55, 0.10),
    "shape-only": (0.75, 0.10), "shape-only pads": (0.85, 0.10), "shape-only transforms": (0.70, 0.75), "dropout": (0.75, 0.15),
    "pointwise": (0.40, 0.40), "pointwise lists": (0.30, 0.30), "pointwise of what is kept": (0.55, 0.70), "lookup": (0.50, 0.50),
    "prelu": (0.60, 0.60), "prelu instance": (0.60, 0.60), "rrelu": (0.45, 0.05), "glu": (0.82, 0.82),
    "addmm": (0.60, 0.60), "einsum": (0.40, 0.40), "einsum tensordot": (0.51, 0.76), "composed-activation": (0.40, 0.40), "rms-norm": (0.45, 1.01), "cross-entropy": (0.60, 0.60), "linear-cross-entropy": (0.25, 0.25), "attention with dropout": (0.50, 0.50), "pointwise gates": (0.36, 0.37), "attention in windows": (0.34, 0.43),
    "rnn lstm": (0.30, 0.30), "rnn gru": (0.30, 0.30), "rnn tanh": (0.30, 0.55),
}


def make(name, how, tmp_path):
    torch.manual_seed(0)
    module = MODELS[name]()
    x = torch.randn(8, 8, 32, 32)
    scripted = torch.jit.script(module) if how == "script" else torch.jit.trace(module, x, check_trace=False)
    original, rewritten = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    scripted.save(original)
    done = subprocess.run([TSMEM, "rewrite", original, "-o", rewritten, "-q"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return original, rewritten, x


def step(module, x, seed):
    torch.manual_seed(seed)
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = module(x)
    if y.requires_grad:
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)).sum().backward()
    return [y.detach(), x.grad] + [p.grad for p in module.parameters()] + [b.clone() for b in module.buffers()]


def freeze(module, frozen):
    for p in module.parameters():
        p.requires_grad_(not frozen)


def alive(module, x):
    """Bytes held after forward: three calls first, as TorchScript changes the graph between calls."""
    x = x.clone().requires_grad_()
    for _ in range(3):
        module(x).sum().backward()
    with allocator.recorded() as prof:
        y = module(x)
        mark = time.time_ns()
        y.sum().backward()
    events = [(e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return sum(n for t, n in events if t <= mark) - y.nbytes


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_bytes(name, how, tmp_path, ops):
    original, rewritten, x = make(name, how, tmp_path)
    for training in (True, False):
        a, b = torch.jit.load(original).double(), torch.jit.load(rewritten).double()
        a.train(training), b.train(training)
        for call in range(4):
            ours, theirs = step(b, x.double(), call), step(a, x.double(), call)
            # What is truly zero (the gradient of a conv bias before a norm) is measured against the largest.
            largest = max(v.double().norm().item() for v in theirs if v is not None)
            for u, v in zip(ours, theirs, strict=True):
                assert (u is None) == (v is None)
                if u is not None:
                    assert (u - v).double().norm() <= 1e-9 * max(v.double().norm().item(), 1e-3 * largest), f"call {call}, training={training}"
    for frozen, limit in zip((False, True), LIMITS[name]):
        a, b = torch.jit.load(original), torch.jit.load(rewritten)
        for m in (a, b):
            m.train()
            freeze(m, frozen)
        ratio = alive(b, x) / alive(a, x)
        assert ratio <= limit, f"{'frozen' if frozen else 'trainable'}: {ratio:.3f}"


@pytest.mark.parametrize("how", ["script", "trace"])
def test_experts(how, tmp_path, ops, monkeypatch):
    """In float32 alone: PyTorch's product of groups takes no float64."""
    monkeypatch.setitem(MODELS, "experts", lambda: two(Experts))
    original, rewritten, x = make("experts", how, tmp_path)
    a, b = torch.jit.load(original), torch.jit.load(rewritten)
    for call in range(4):
        for u, v in zip(step(b, x, call), step(a, x, call), strict=True):
            torch.testing.assert_close(u, v, rtol=1e-4, atol=1e-4)
    assert alive(b, x) / alive(a, x) <= 0.55


def test_the_same_file_serves_every_state(tmp_path, ops):
    """Frozen after loading, thawed again, eval and train: what is kept follows, without another rewrite."""
    original, rewritten, x = make("bn-act", "script", tmp_path)
    a, b = torch.jit.load(original), torch.jit.load(rewritten)
    everything = alive(b, x)
    freeze(b, True)
    frozen = alive(b, x)
    b.eval()
    frozen_eval = alive(b, x)
    b.train()
    freeze(b, False)
    assert frozen_eval < 0.1 * everything < frozen <= everything
    assert alive(b, x) == everything
    assert alive(a, x) >= everything


def test_deepcopy_and_half(tmp_path, ops):
    import copy
    _, rewritten, x = make("bn-act-mul", "script", tmp_path)
    m = torch.jit.load(rewritten)
    with torch.no_grad():  # else the copies of a scripted module's parameters are no leaves
        twin = copy.deepcopy(m)
    freeze(twin, False)
    for u, v in zip(step(m, x, 0), step(twin, x, 0), strict=True):
        assert u is v is None or torch.equal(u, v)
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(m).to(dtype)
        for _ in range(3):
            assert all(t.isfinite().all() for t in step(half, x.to(dtype), 0) if t is not None)
    last = copy.deepcopy(m).to(memory_format=torch.channels_last)
    assert last(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


def test_freeze_and_optimize_for_inference(tmp_path, ops):
    original, rewritten, x = make("bn-add-act", "script", tmp_path)
    want = torch.jit.load(original).eval()(x)
    for optimise in (torch.jit.freeze, torch.jit.optimize_for_inference):
        frozen = optimise(torch.jit.load(rewritten).eval())
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(frozen(x), want, rtol=1e-4, atol=1e-5)


def test_a_graph_with_many_values_of_one_name(tmp_path, ops):
    """They get names of their own, as LibTorch takes quadratic time to number them; what is computed stays."""
    path, new = tmp_path / "deep.pt", tmp_path / "new.pt"
    torch.jit.script(nn.Sequential(*(m for _ in range(110) for m in (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())))).save(str(path))
    subprocess.run([TSMEM, "rewrite", str(path), "-o", str(new)], check=True, capture_output=True)
    a, b = (torch.jit.load(str(p)).double().train() for p in (path, new))
    assert "bn_training_105" in b.code
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(b(x), a(x), rtol=1e-9, atol=1e-9)
