"""160 random programs with fixed seeds, and that the comparison can fail: a rewrite that is wrong on purpose is caught."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = pathlib.Path(os.environ.get("TSMEM_BUILD", ROOT / "build"))

# Stands in for the tool: rewrites, and then changes the result as FAULT says.
FAULTY = """#!{python}
import os, re, subprocess, sys, zipfile
code = subprocess.run([{tool!r}, *sys.argv[1:]]).returncode
out = sys.argv[sys.argv.index("-o") + 1]
if code == 0:
    with zipfile.ZipFile(out) as z:
        parts = [(i.filename, z.read(i)) for i in z.infolist()]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        for name, data in parts:
            if name.endswith(".py"):
                data = re.sub({pattern!r}, {text!r}, data.decode()).encode()
            z.writestr(name, data)
sys.exit(code)
"""
FAULTS = {
    "a product is a sum": (r"ops\.tsmem\.mul\(([^()]*)\)", r"torch.add(\1)"),
    "dropout that draws again": (r"ops\.tsmem\.dropout\((\w+), ((?:[^()]|\([^()]*\))*)\)", r"ops.tsmem.dropout(torch.dropout(\1, 0.5, True), \2)"),
}


def fuzz(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(HERE / "fuzz.py"), *arguments], capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("seeds", ["0:40", "40:80", "80:120", "120:160"])
def test_random_programs(seeds, tmp_path):
    done = fuzz(seeds, "--most", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = map(int, seeds.split(":"))
    programs, wrong = map(int, re.fullmatch(r"(\d+) programs, (\d+) wrong", done.stdout.splitlines()[-1]).groups())
    assert wrong == 0 and programs >= 0.9 * (last - first), done.stdout  # the rest is discarded


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rewrite_is_caught(fault, tmp_path):
    pattern, text = FAULTS[fault]
    tool = tmp_path / "tsmem"
    tool.write_text(FAULTY.format(python=sys.executable, tool=os.environ.get("TSMEM_BIN", str(BUILD / "bin" / "tsmem")), pattern=pattern, text=text))
    tool.chmod(0o755)
    done = fuzz("0:16", "--levels", "regions", "--keep", str(tmp_path), "--no-reduce", TSMEM_BIN=str(tool))
    assert done.returncode == 1, done.stdout + done.stderr
    programs, wrong = map(int, re.fullmatch(r"(\d+) programs, (\d+) wrong", done.stdout.splitlines()[-1]).groups())
    assert 0 < wrong < programs
    # A failure's file shows the fault, and with the right tool none.
    files = [tmp_path / f"{m}.py" for m in re.findall(r"^program (\d+) is wrong", done.stdout, re.M)]
    shown = lambda **environment: subprocess.run([sys.executable, str(HERE / "check.py"), str(files[0]), "regions"], capture_output=True, text=True, env={**os.environ, **environment})
    assert shown(TSMEM_BIN=str(tool)).returncode == 1
    assert shown().returncode == 0


COMPILED_WRONG = """
import sys
sys.path.insert(0, {here!r})
import torch
import check, compiled

def negated(graph, examples):
    run = compiled.backend(graph, examples)
    def wrong(*values):
        first, *rest = run(*values)
        return (-first, *rest)
    return wrong

class P(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x, y, flag: bool, n: int):
        return torch.relu(self.conv(x)) * y

check.setup()
config = dict(dtype="float64", how="script", shape=(2, 4, 8, 8), inputs=["made", "leaf"], layout="contiguous", frozen="", method="forward",
              calls=[(True, True, 2, True)] * 2, autocast=False, backward="once")
right, wrong = (compiled.wrong(config, "", lambda: P().double(), *b) for b in ((), (negated,)))
assert not right, right
assert any(line.startswith("call 1: output 0: relative difference") for line in wrong), wrong
"""


def test_a_wrong_graph_is_caught():
    done = subprocess.run([sys.executable, "-c", COMPILED_WRONG.format(here=str(HERE))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
