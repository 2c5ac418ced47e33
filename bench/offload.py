"""What offloading would give on a device that is not here: peak memory and step time by budget, over links of 25 and 50 GB/s.

    python bench/offload.py [--models tv:resnet50 tv:vit_b_16] [--batch 256] [--step 0.1 0.25] [--points 6]

Plans from shapes alone (`tsmem plan --estimate`), in bfloat16. A plan knows a step's parts in proportion to one another; `--step` says how many seconds
the original's step takes on the device, a number a model, and so how fast the link is beside it.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "fixtures"), str(ROOT / "python")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tv:resnet50", "tv:vit_b_16"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--step", nargs="+", type=float, default=[0.1, 0.25])
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--links", nargs="+", type=float, default=[0, 25e9, 50e9], metavar="BYTES/S")
    a = parser.parse_args()
    if len(a.step) != len(a.models):
        parser.error("--step takes a number for each of --models")
    import models
    import torch
    import tsmem

    print(f"{'model':12}{'link GB/s':>10}{'peak GiB':>10}{'of original':>12}{'step ms':>9}{'of original':>12}{'offloaded GiB':>15}")
    for name, seconds in zip(a.models, a.step):
        module = torch.jit.script(models.build(name).bfloat16())
        options = dict(input=f"{a.batch}x3x224x224:bf16", estimate=True, points=a.points)
        original = tsmem.plan(module, **{**options, "points": 2})["original"]
        for link in a.links:
            scaled = dict(offload=True, link=link * seconds / original["step_seconds"]) if link else {}
            seen = set()
            for p in tsmem.plan(module, **options, **scaled)["points"]:
                row = (p["predicted_peak_bytes"] / 2**30, p["predicted_seconds"] / original["step_seconds"])
                if row in seen:
                    continue
                seen.add(row)
                print(f"{name[3:]:12}{link / 1e9 if link else '-':>10}{row[0]:10.2f}{p['predicted_peak_bytes'] / original['peak_bytes']:12.3f}"
                      f"{row[1] * seconds * 1e3:9.1f}{row[1]:12.3f}{p['offloaded_bytes'] / 2**30:15.2f}", flush=True)


if __name__ == "__main__":
    main()
