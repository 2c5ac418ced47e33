"""What the machine code of the CUDA kernels says without a device: registers, spills, shared memory, and how much a kernel reads at once.

    python bench/cuda_code.py [LIBRARY] [--arch sm_90] [--device h100|h200|a100] [--only TEXT ...] [--json FILE]

A kernel that waits for memory alone moves, by Little's law, as many bytes a second as it has in flight divided by the memory's latency. In flight is, for each
multiprocessor: threads that fit there, times 16 bytes for each wide load (LDG.E.128) that is issued before the first of them is used. The share is of the device's bandwidth,
at most 1: what a kernel's arithmetic or the cache makes of it, only a device shows (bench/cuda.sh each). Reads of operands that a call does not have (a residual, say) count.
Shared memory whose size a launch gives is not in the code: the kernels that keep a map there (persistent_...) run with one block where a map fills more than half of it.

Needs cuobjdump: of the CUDA toolkit, of Triton's package (which PyTorch brings along), or the file that CUOBJDUMP names.
"""
import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LATENCY = 0.75e-6  # seconds from a load to its value, under load
# Bandwidth in bytes a second, multiprocessors; registers, shared bytes and threads of one.
DEVICES = {"h100": (3.35e12, 132, 65536, 228 << 10, 2048), "h200": (4.8e12, 132, 65536, 228 << 10, 2048), "a100": (2.04e12, 108, 65536, 164 << 10, 2048)}
THREADS = 256  # of a block, in all our kernels


def cuobjdump() -> str:
    """The program, wherever it is."""
    spec = importlib.util.find_spec("triton")
    places = [os.environ.get("CUOBJDUMP"), shutil.which("cuobjdump"), "/usr/local/cuda/bin/cuobjdump"]
    places += [str(Path(p) / "backends/nvidia/bin/cuobjdump") for p in (spec.submodule_search_locations if spec else [])]
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    sys.exit("There is no cuobjdump: install triton ('pip install triton') or the CUDA toolkit, or name one in CUOBJDUMP.")


def lines_of(*arguments):
    """What cuobjdump prints, line by line: the code of all kernels at once is large."""
    with subprocess.Popen([cuobjdump(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        yield from running.stdout
        said = running.stderr.read().strip()
    if running.returncode:
        sys.exit(f"cuobjdump: {said.splitlines()[-1] if said else 'failed'}")


def code_of(library, arch):
    """(mangled name, instructions) of each kernel."""
    name, code = None, []
    for line in lines_of("-sass", "-arch", arch, str(library)):
        if "Function : " in line:
            if name:
                yield name, code
            name, code = line.split("Function : ")[1].strip(), []
        else:
            code.append(line)
    if name:
        yield name, code


def plain_names(names) -> dict:
    """Mangled name: the kernel with its template arguments, without namespaces and parameters."""
    if not shutil.which("c++filt"):
        sys.exit("There is no c++filt: install binutils.")
    found = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
    short = [re.sub(r"\(anonymous namespace\)::|tsmem::|cuda::|acts::|^void ", "", n) for n in found]
    return {name: re.sub(r"\((?:NormArgs|PoolArgs|Pool2d|StatsArgs|SumsArgs|Act|double const).*", "", s) for name, s in zip(names, short)}


def most_in_flight(code) -> int:
    """Of a kernel's instructions: the most wide loads that are issued before one of them is used."""
    pending, most = [], 0
    for line in code:
        found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;", line)
        if not found:
            continue
        name, operands = found.groups()
        used = {int(r) for r in re.findall(r"\bR(\d+)\b", operands)}
        if name.startswith("LDG") and ".128" in name:
            to = int(re.match(r"R(\d+)", operands).group(1))
            used.discard(to)
            if pending and any(set(range(p, p + 4)) & used for p in pending):
                pending = []
            pending.append(to)
            most = max(most, len(pending))
            continue
        # Wider registers are named by their first; a use of any part waits for the load.
        if any(set(range(p, p + 4)) & used for p in pending):
            pending = []
        if name in ("EXIT", "RET"):
            pending = []
    return most


def kernels(library, arch) -> list:
    """A dict for each kernel of the library."""
    usage = re.findall(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", "".join(lines_of("-res-usage", "-arch", arch, str(library))))
    if not usage:
        sys.exit(f"'{library}' has no machine code for {arch}.")
    names = plain_names([u[0] for u in usage])
    code = {name: (sum("STL" in x or "LDL" in x for x in lines), most_in_flight(lines)) for name, lines in code_of(library, arch)}
    return [{"kernel": names[n], "registers": int(r), "stack": int(s), "shared": int(m), "spills": code[n][0], "loads": code[n][1]} for n, r, s, m, _ in usage]


def with_device(k, device) -> dict:
    """Blocks of a multiprocessor, bytes in flight there, and the share of bandwidth that these allow."""
    bandwidth, processors, registers, shared, threads = DEVICES[device]
    each = -(-k["registers"] // 8) * 8 * THREADS
    blocks = min(threads // THREADS, registers // each, shared // (k["shared"] + 1024))
    flight = blocks * THREADS * 16 * k["loads"]
    return {**k, "blocks": blocks, "in_flight": flight, "share": min(1.0, flight / (bandwidth / processors * LATENCY))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", type=Path, default=ROOT / "build/lib/libtsmem_ops_cuda.so")
    parser.add_argument("--arch", default="sm_90", help="whose machine code (default sm_90)")
    parser.add_argument("--device", choices=DEVICES, default="h100", help="whose bandwidth (default h100)")
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose name has one of these texts")
    parser.add_argument("--json", help="write the table there too")
    a = parser.parse_args()
    if not a.library.is_file():
        sys.exit(f"There is no '{a.library}': build with nvcc, or name a libtsmem_ops_cuda.so.")
    rows = [with_device(k, a.device) for k in kernels(a.library, a.arch) if not a.only or any(t in k["kernel"] for t in a.only)]
    print(f"{'kernel':58}{'registers':>10}{'spills':>7}{'shared':>8}{'blocks':>7}{'loads':>6}{'in flight':>10}{'share':>6}")
    for k in sorted(rows, key=lambda k: k["kernel"]):
        print(f"{k['kernel'][:57]:58}{k['registers']:10}{k['spills']:7}{k['shared']:8}{k['blocks']:7}{k['loads']:6}{k['in_flight'] / 1024:7.0f} KB{k['share']:6.2f}")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
