"""Loads a (rewritten) TorchScript file and trains it for a few steps on random images.

    python examples/train.py MODEL.pt [STEPS [BATCH [SIZE]]]

After `pip install .` no word of tsmem is needed: `import torch` loads the operators. Without it, add `import tsmem`.
"""
import sys

import torch
import torch.nn.functional as F


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    steps, batch, size = (int(v) for v in (sys.argv[2:5] + ["5", "4", "64"][len(sys.argv) - 2 :]))
    model = torch.jit.load(sys.argv[1]).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size)
    for step in range(steps):
        optimizer.zero_grad()
        output = model(images)
        loss = F.cross_entropy(output, torch.arange(batch) % output.shape[1])
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
