"""Ops of libtsmem_ops.so against their namesakes in PyTorch: forward + backward, interleaved, median of the ratios.

    python bench/bench_ops.py path/to/libtsmem_ops.so [--threads 2] [--rounds 15] [--json FILE]

Below 1.00 is faster than PyTorch.
"""
import argparse
import json
import statistics
import sys
import time

import torch

MAX_POOLS = {  # name: input, kernel, stride, padding
    "resnet stem 3x3/2": ((8, 64, 112, 112), 3, 2, 1),
    "vgg 1st 2x2/2": ((4, 64, 224, 224), 2, 2, 0),
    "vgg 3rd 2x2/2": ((4, 256, 56, 56), 2, 2, 0),
    "googlenet 3x3/1": ((8, 192, 28, 28), 3, 1, 1),
    "sppf 5x5/1": ((8, 128, 20, 20), 5, 1, 2),
}
RELUS = {"resnet stem": (8, 64, 112, 112), "resnet layer1": (8, 256, 56, 56), "resnet layer4": (8, 512, 7, 7)}


def once(op, x, cotangent):
    start = time.perf_counter()
    op(x).backward(cotangent)
    taken = time.perf_counter() - start
    x.grad = None
    return taken


def compare(ours, pytorch, x, rounds):
    """The median over rounds of (time of ours / time of PyTorch), each round in both orders, after two warm-up rounds."""
    cotangent = torch.randn_like(pytorch(x).detach())
    ratios = []
    for i in range(rounds + 2):
        pair = {f: once(f, x, cotangent) for f in ((ours, pytorch) if i % 2 else (pytorch, ours))}
        ratios.append(pair[ours] / pair[pytorch])
    return statistics.median(ratios[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.ops.load_library(args.library)
    ops = torch.ops.tsmem
    torch.manual_seed(0)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            cases = []
            for name, (shape, *window) in MAX_POOLS.items():
                cases.append(("max_pool2d", name, shape, lambda x, w=window: ops.max_pool2d(x, *w),
                              lambda x, w=window: torch.nn.functional.max_pool2d(x, *w)))
            for name, shape in RELUS.items():
                cases.append(("relu", name, shape, lambda x: ops.act(x, "relu", []), torch.relu))
                cases.append(("leaky_relu", name, shape, lambda x: ops.act(x, "leaky_relu", [0.01]),
                              lambda x: torch.nn.functional.leaky_relu(x, 0.01)))
            for op, name, shape, ours, pytorch in cases:
                x = torch.randn(shape).to(dtype).contiguous(memory_format=layout).requires_grad_()
                row = {"op": op, "case": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."),
                       "layout": "channels_last" if layout == torch.channels_last else "contiguous",
                       "ratio": compare(ours, pytorch, x, args.rounds)}
                results.append(row)
                print(f"{row['op']:<12}{row['case']:<20}{row['dtype']:<10}{row['layout']:<15}{row['ratio']:.2f}", flush=True)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(results, out, indent=1)


if __name__ == "__main__":
    sys.exit(main())
