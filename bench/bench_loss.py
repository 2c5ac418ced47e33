"""A language model's step with its loss, eager: saved bytes, peak and time of PyTorch, of torch.compile(backend="tsmem"), and of PyTorch's own linear_cross_entropy, which the model's code has to call (torch 2.15).

    python bench/bench_loss.py [--words 16000] [--width 256] [--layers 4] [--batch 8] [--length 256] [--rounds 7] [--threads 1]

Ratios to eager PyTorch, in one process that runs the three in turns.
"""
import argparse
import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "fixtures"), str(ROOT / "python")]
import allocator  # noqa: E402


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class WithLoss(nn.Module):
    """Each word guesses the next; the weights of the first and the last layer are one."""

    def __init__(self, words: int, width: int, layers: int):
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(words, width), nn.Sequential(*[Block(width) for _ in range(layers)]), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def features(self, words):
        return self.norm(self.blocks(self.embed(words)))

    def forward(self, words):
        return F.cross_entropy(self.head(self.features(words))[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class WithPyTorchsOperator(WithLoss):
    def forward(self, words):
        rows = self.features(words)[:, :-1].flatten(0, 1)
        return F.linear_cross_entropy(rows, self.head.weight, words[:, 1:].flatten(), options=nn.LinearCrossEntropyOptions())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("words", 16000), ("width", 256), ("layers", 4), ("batch", 8), ("length", 256), ("rounds", 7), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    allocator.keep_freed_memory()
    model = WithLoss(a.words, a.width, a.layers)
    steps = {"eager": model, 'backend="tsmem"': torch.compile(copy.deepcopy(model), backend="tsmem")}
    if hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):
        own = WithPyTorchsOperator(a.words, a.width, a.layers)
        own.load_state_dict(model.state_dict())
        steps["linear_cross_entropy, eager"] = own
    inputs = (torch.randint(a.words, (a.batch, a.length)),)
    for step in steps.values():
        step(*inputs).backward()
    memory = [allocator.memory(step, inputs) for step in steps.values()]
    times = allocator.times(tuple(steps.values()), inputs, a.rounds)
    print(f"{a.batch}x{a.length} of {a.words} words, {a.layers} layers {a.width} wide, {a.threads} thread{'s'[: a.threads != 1]}, torch {torch.__version__.split('+')[0]}")
    print(f"{'':30}{'saved MiB':>10}{'ratio':>7}{'peak MiB':>10}{'ratio':>7}{'time':>7}")
    for name, m, time in zip(steps, memory, times.ratios):
        print(f"{name:30}{m.saved / 2**20:10.1f}{m.saved / memory[0].saved:7.2f}{m.peak / 2**20:10.1f}{m.peak / memory[0].peak:7.2f}{time:7.2f}")


if __name__ == "__main__":
    main()
