"""Writes the models that tests/threads/threads.cpp runs, all in float64, and their input: write_models.py FOLDER"""

import pathlib
import sys
from typing import List

import torch
import tsmem
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.b1(self.c1(x)))
        return torch.relu(self.b2(self.c2(y)) + x)


class Residual(nn.Module):
    """Recipes in chains, shared by parts of the graph: residual blocks and a concatenation that several read."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.MaxPool2d(2)
        self.layers = nn.Sequential(Block(width), Block(width), Block(width))
        self.left, self.right = nn.Conv2d(2 * width, 4, 1), nn.Conv2d(2 * width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        c = torch.cat([x, self.layers(x)], 1)
        return self.left(c) * torch.sigmoid(self.right(c))


class Transformer(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.embed, self.ln1, self.ln2 = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, [3, 2, -1]).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.ln2(x))))
        return self.head(x.mean(1))


def branch(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.ops.tsmem.act(x, "silu", [], 1)
    return torch.ops.tsmem.conv2d(y, weight, None, [1, 1], [1, 1])


class Forks(nn.Module):
    """Branches of one forward on threads of their own, which read the same outputs."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.w0, self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(width, 2 * width, 3, 3) / 10) for _ in range(4))
        self.stem = nn.Conv2d(3, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        c = torch.ops.tsmem.cat([torch.ops.tsmem.act(y, "relu", [], 1), y], 1, 1)
        futures: List[torch.jit.Future[Tensor]] = []
        for w in [self.w0, self.w1, self.w2, self.w3]:
            futures.append(torch.jit.fork(branch, c, w))
        return torch.cat([torch.jit.wait(f) for f in futures] + [c.detach()], 1)


def write(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    residual, transformer = torch.jit.script(Residual().double()), torch.jit.script(Transformer().double())
    models = {
        "residual": tsmem.rewrite(residual),
        "checkpoint": tsmem.rewrite(residual, checkpoint="layers.*"),
        "plan": tsmem.rewrite(residual.float(), input="2x3x24x24", budget="60%", no_verify=True).double(),
        "transformer": tsmem.rewrite(transformer),
        "forks": torch.jit.script(Forks().double()),
    }
    for name, model in models.items():
        model.save(str(folder / f"{name}.pt"))
    torch.save(torch.randn(2, 3, 24, 24, dtype=torch.float64), folder / "input.pt")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
