"""Trains a TorchScript file with DistributedDataParallel on random images, each process with its share of the batch.

    torchrun --nproc-per-node 2 examples/train_ddp.py MODEL.pt [STEPS [BATCH [SIZE]]] [--gradients FILE.pt]

A rewritten model is wrapped like any other. After `pip install .` no word of tsmem is needed; without it, add `import tsmem`.
--gradients saves the first process's averaged gradients of the first step.
"""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("steps", nargs="?", type=int, default=5)
    parser.add_argument("batch", nargs="?", type=int, default=4, help="images a process")
    parser.add_argument("size", nargs="?", type=int, default=64)
    parser.add_argument("--gradients")
    a = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    model = DistributedDataParallel(torch.jit.load(a.model, map_location=device).train())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    images = torch.randn(a.batch, 3, a.size, a.size, generator=torch.Generator().manual_seed(rank)).to(device)
    for step in range(a.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        output = model(images)
        loss = F.cross_entropy(output, torch.arange(a.batch, device=device) % output.shape[1])
        loss.backward()
        if rank == 0 and step == 0 and a.gradients:
            torch.save({n: p.grad.cpu() for n, p in model.module.named_parameters() if p.grad is not None}, a.gradients)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} {time.perf_counter() - start:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
