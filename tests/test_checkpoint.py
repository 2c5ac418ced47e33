"""Modules that run again in backward (`--checkpoint`): each gradient is passed on once, and hooks run once, as in the original."""
import itertools

import pytest
import torch
import tsmem
from torch import nn


class Block(nn.Module):
    """Of two arguments, and of a layer that others have too."""

    def __init__(self, shared: nn.Linear):
        super().__init__()
        self.linear, self.shared = nn.Linear(6, 6), shared

    def forward(self, x, h):
        return self.shared(torch.tanh(self.linear(x)) * h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.block = Block(self.shared)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        y = x * 2.0
        return self.last(self.shared(self.block(y, y.sin() + y)))


def models():
    torch.manual_seed(0)
    original = torch.jit.script(Net().double())
    new = tsmem.rewrite(original, checkpoint=["block"])
    assert "tsmem::checkpoint" in str(new.inlined_graph)
    return original, new, torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("create_graph,frozen", list(itertools.product((False, True), repeat=2)))
def test_hooks_run_once(create_graph, frozen):
    """Of parameters inside and outside of the module, also where an argument is made from another one."""
    results = []
    *pair, x = models()
    for model in pair:
        calls = []
        for name, p in model.named_parameters():
            if frozen and name == "block.linear.weight":
                p.requires_grad_(False)
                continue
            p.register_hook(lambda g, name=name: calls.append(name) or g * 2)
        leaf = x.clone().requires_grad_()
        leaf.register_hook(lambda g: g * 3)
        for _ in range(3):
            model(leaf).square().sum().backward(create_graph=create_graph)
        results.append([leaf.grad.detach(), *(p.grad.detach() for p in model.parameters() if p.grad is not None)])
        assert len(calls) == 3 * sum(p.requires_grad for p in model.parameters())
    assert len(results[0]) == len(results[1])
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want)


def test_second_derivatives():
    results = []
    *pair, x = models()
    for model in pair:
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
        results.append([g.detach(), *torch.autograd.grad(g.square().sum(), [leaf, *model.parameters()], allow_unused=True)])
    for got, want in zip(results[1], results[0]):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)
