"""Patterns of the user's own: the example of docs/your-own-patterns.md as it stands there, and what the tool says of faults."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import conftest
from command_line import BINARY, ROOT, fails, run

PAGE = (ROOT / "docs/your-own-patterns.md").read_text()
EXAMPLE = ROOT / "examples/own_patterns"


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL).group(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The example, built and run by the commands of the page."""
    folder = tmp_path_factory.mktemp("examples") / "own_patterns"
    shutil.copytree(EXAMPLE, folder)
    path = os.pathsep.join([str(pathlib.Path(BINARY).parent), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    commands = block("sh").replace("cd examples/own_patterns", f"cd '{folder}'")
    done = subprocess.run(["bash", "-ec", commands], env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "printed").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("file", ["bias_gelu.cpp", "bias_gelu.patterns"])
def test_page_shows_the_example(file):
    shown = re.search(rf"```\w*\n(?://|#) examples/own_patterns/{file}\n(.*?)```", PAGE, re.DOTALL).group(1)
    source = (EXAMPLE / file).read_text()
    assert shown in source and len(source) - len(shown) < 100


def test_command_line(folder):
    printed = (folder / "printed").read_text()
    assert "bias_gelu.patterns: 1 pattern, no fault" in printed
    assert re.search(r"^bias-gelu +1 +bias, x$", printed, re.MULTILINE), printed
    assert "Verified: " in printed


def test_saves_memory_and_trains(folder):
    conftest.load()
    import tsmem

    torch.ops.load_library(str(folder / "libbias_gelu.so"))
    x = torch.randn(512, 64)
    old, new = torch.jit.load(str(folder / "mlp.pt")), torch.jit.load(str(folder / "mlp.mem.pt"))
    assert "mine::bias_gelu" in str(new.inlined_graph) and "aten::tanh" not in str(new.inlined_graph)
    saved = [tsmem.profile(m, input=x)["saved_bytes"] for m in (old, new)]
    assert saved[1] <= 0.5 * saved[0], saved
    again = tsmem.restore(new)
    assert tsmem.diff(old, again)["equal"] and tsmem.verify(old, new, input=x)["equal"]


def test_python(folder, monkeypatch):
    conftest.load()
    import tsmem

    monkeypatch.chdir(folder)
    names = {"torch": torch, "tsmem": tsmem}
    exec(block("python"), names)
    assert "mine::bias_gelu" in str(names["new"].inlined_graph)
    with pytest.raises(tsmem.Error, match=r"nothing.patterns' can't be read"):
        tsmem.rewrite(torch.jit.load("mlp.pt"), patterns="nothing.patterns")


def test_faults_of_the_command_line(folder, tmp_path):
    ops = ("--ops", folder / "libbias_gelu.so")
    patterns, model = folder / "bias_gelu.patterns", folder / "mlp.pt"
    fails(3, "patterns", "--check", patterns, says=f"{patterns}:14:8: there is no operator 'mine::bias_gelu': load the library")
    fails(3, "rewrite", model, "-o", tmp_path / "new.pt", "--patterns", patterns, says=":14:8: ")
    fails(2, "rewrite", model, "-o", tmp_path / "new.pt", "--patterns", patterns, "--patterns", patterns, *ops, says="two patterns of this name")
    fails(2, "rewrite", model, "-o", tmp_path / "new.pt", "--restore", "--patterns", patterns, *ops, says="--restore and --patterns exclude")
    fails(2, "rewrite", model, "-o", tmp_path / "new.pt", "--patterns", patterns, *ops, "--only", "bias-gel", says="did you mean 'bias-gelu'?")
    assert not (tmp_path / "new.pt").exists()


def test_inspect_plan_and_estimate(folder, tmp_path):
    own = ("--ops", folder / "libbias_gelu.so", "--patterns", folder / "bias_gelu.patterns")
    model = folder / "mlp.pt"
    assert re.search(r"^bias-gelu +1$", run("inspect", model, *own).stdout, re.MULTILINE)
    assert run("plan", model, *own, "--input", "64x64", "--points", "2").returncode == 0
    done = run("rewrite", model, "-o", tmp_path / "new.pt", *own, "--input", "64x64", "--budget", "90%", "--estimate")
    assert done.returncode == 0, done.stderr


def test_numbers_decide(folder, tmp_path):
    """The exact gelu in the place of the formula with tanh: no file is written."""
    wrong = tmp_path / "wrong.patterns"
    wrong.write_text((folder / "bias_gelu.patterns").read_text().replace("%z = mine::bias_gelu(%x, %bias)", "%s = add(%x, %bias)\n  %z = gelu(%s)"))
    out = tmp_path / "new.pt"
    done = run("rewrite", folder / "mlp.pt", "-o", out, "--patterns", wrong, "--input", "64x64")
    assert done.returncode == 1 and "failed its verification, so no file was written" in done.stderr, done.stderr
    assert not out.exists()


class SineThenCosine(torch.nn.Module):
    def forward(self, x):
        return (x * 2).sin().cos().sum()


def test_notes_on_patterns_that_meet(tmp_path):
    """The same notes when a file is checked and when it is used."""
    model, patterns = tmp_path / "model.pt", tmp_path / "both.patterns"
    torch.jit.script(SineThenCosine()).save(str(model))
    patterns.write_text("".join(f"pattern {name}\nmatch\n  %z = {old}(%x)\nrewrite\n  %z = {new}(%x)\n" for name, old, new in [("p", "sin", "cos"), ("q", "cos", "sin")]))
    checked = run("patterns", "--check", patterns)
    notes = [line for line in checked.stdout.splitlines() if line.startswith("Note: ")]
    assert "Note: p matches what q puts in." in notes and "Note: q matches what p puts in." in notes, checked.stdout
    used = run("rewrite", model, "--dry-run", "--patterns", patterns)
    assert used.returncode == 0 and [line for line in used.stdout.splitlines() if line.startswith("Note: ")] == notes, used.stdout + used.stderr
    assert "Note: " not in run("rewrite", model, "--dry-run", "--patterns", patterns, "--json", "-").stdout
