"""Writes mlp.pt: a linear layer, its bias and the activation, each a module of its own."""
import torch
from torch import nn


class Bias(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x + self.bias


class Gelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


torch.jit.script(nn.Sequential(nn.Linear(64, 256, bias=False), Bias(256), Gelu(), nn.Linear(256, 64))).save("mlp.pt")
