"""Time of tsmem::batch_norm_act against PyTorch's batch_norm + relu_, forward and backward in training mode, at ResNet-50's shapes;
with --group of tsmem::group_norm_act against group_norm + silu, at those of a diffusion model's UNet.

Both are run in turn, the first of a pair changing, so that other load on the machine hits them alike; the table shows the median
of the ratios. Freed memory is kept (glibc's mallopt): which of the two would clear new pages is chance. --trim: glibc's defaults.
"""

import argparse
import ctypes
import os
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F

SHAPES = [(64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)]
GROUP_SHAPES = [(128, 64), (320, 64), (640, 32), (1280, 16), (2560, 16), (1280, 8)]
GROUPS = 32
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--library", default=os.environ.get("TSMEM_OPS", "build/lib/libtsmem_ops.so"))
    parser.add_argument("--trim", action="store_true", help="let the allocator give freed memory back to the system")
    parser.add_argument("--add", action="store_true", help="with a residual: relu(batch_norm(x) + z)")
    parser.add_argument("--group", action="store_true", help="silu(group_norm(x)), of 32 groups")
    return parser.parse_args()


def pytorch(x, w, b, m, v, z):
    n = F.batch_norm(x, m, v, w, b, True, 0.1, 1e-5)
    if z is not None:
        n += z
    return F.relu_(n)


def fused(x, w, b, m, v, z):
    if z is not None:
        return torch.ops.tsmem.batch_norm_add_act(x, w, b, m, v, True, 0.1, 1e-5, True, z, "relu", [])
    return torch.ops.tsmem.batch_norm_act(x, w, b, m, v, True, 0.1, 1e-5, True, "relu", [])


def pytorch_group(x, w, b, *_):
    return F.silu(F.group_norm(x, GROUPS, w, b))


def fused_group(x, w, b, *_):
    return torch.ops.tsmem.group_norm_act(x, GROUPS, w, b, 1e-5, True, "silu", [])


def seconds(f, inputs, grad):
    start = time.perf_counter()
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    torch.autograd.grad(f(*inputs), wanted, grad)
    return time.perf_counter() - start


def main():
    args = parse()
    ours_of, theirs_of, shapes = (fused_group, pytorch_group, GROUP_SHAPES) if args.group else (fused, pytorch, SHAPES)
    torch.set_num_threads(args.threads)
    torch.ops.load_library(str(pathlib.Path(args.library).resolve()))
    print(f"batch {args.batch}, {args.threads} threads: time of the fused op / PyTorch, median of {args.rounds} pairs (ms)")
    if args.trim:
        # glibc's malloc takes large blocks from the system, page by page, until it has seen one of their size freed.
        torch.ones(args.batch * max(c * size * size for c, size in shapes))
    else:
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1), libc.mallopt(M_MMAP_MAX, 0)
    total = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, layout in FORMATS.items():
            for c, size in shapes:
                x = torch.randn(args.batch, c, size, size).to(dtype).contiguous(memory_format=layout).requires_grad_()
                z = torch.randn_like(x).detach().requires_grad_() if args.add else None
                w, b = (torch.rand(c) + 0.5).requires_grad_(), torch.randn(c).requires_grad_()
                inputs = (x, w, b, torch.zeros(c), torch.ones(c), z)
                grad = torch.randn_like(x)
                pairs = []
                for i in range(args.rounds + 2):
                    first = [seconds(f, inputs, grad) for f in ((ours_of, theirs_of) if i % 2 else (theirs_of, ours_of))]
                    pairs.append(first if i % 2 else first[::-1])
                pairs = pairs[2:]
                ours, theirs = statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)
                ratio = statistics.median(p[0] / p[1] for p in pairs)
                sums = total.setdefault((dtype, name), [0.0, 0.0])
                sums[0] += ours
                sums[1] += theirs
                print(f"{str(dtype)[6:]:9} {name:14} {c:5} x {size:3}  {ratio:5.2f}   {1e3 * ours:8.2f} / {1e3 * theirs:8.2f}", flush=True)
    for (dtype, name), (ours, theirs) in total.items():
        print(f"{str(dtype)[6:]:9} {name:14} all shapes   {ours / theirs:5.2f}")


if __name__ == "__main__":
    main()
