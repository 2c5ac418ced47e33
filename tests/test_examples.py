"""The C++ examples: built with CMake's find_package against an installed tsmem, and run; LD_PRELOAD and dlopen into a program that knows nothing of it."""
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

import conftest
import models

ROOT = Path(__file__).resolve().parents[1]
BUILD = conftest.library().parents[1]


def run(*command, env=None):
    return subprocess.run([str(c) for c in command], env={**os.environ, **(env or {})}, capture_output=True, text=True)


def output(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """`cmake --install`, into a folder whose name needs quoting."""
    folder = tmp_path_factory.mktemp("installed here") / "with space"
    output(run("cmake", "--install", BUILD, "--prefix", folder))
    return folder


@pytest.fixture(scope="module")
def programs(prefix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if not run("which", "ccache").returncode else []
    output(run("cmake", "-S", ROOT / "examples", "-B", folder, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", *launcher,
               env={"TSMEM_TORCH": str(Path(torch.__file__).parent)}))
    output(run("cmake", "--build", folder))
    return folder


@pytest.fixture(scope="module")
def files(prefix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    original, new = folder / "resnet18.pt", folder / "resnet18.mem.pt"
    models.make("tv:resnet18", "script", original)
    output(run(prefix / "bin" / "tsmem", "rewrite", original, "-o", new))
    return original, new


def test_installed_layout(prefix):
    names = {str(p.relative_to(prefix)) for p in prefix.rglob("*")}
    assert {"bin/tsmem", "lib/libtsmem_ops.so", "lib/libtsmem.so", "include/tsmem/session.h", "lib/cmake/tsmem/tsmemConfig.cmake"} <= names


def test_rewriting_in_a_program_of_ones_own(programs, files, prefix, tmp_path):
    """find_package gives tsmem::tsmem; the file is the tool's, and nothing is left where something is wrong."""
    new = tmp_path / "new.pt"
    text = output(run(programs / "rewrite", files[0], new))
    assert re.search(r"\d+ matches; .*\nsaved for backward: \d+ of \d+ bytes", text), text
    assert run(prefix / "bin" / "tsmem", "diff", files[1], new).returncode == 0
    done = run(programs / "rewrite", files[0], new)
    assert done.returncode == 2 and "exists already" in done.stderr and done.stderr.count("\n") == 1
    done = run(programs / "rewrite", tmp_path / "none.pt", tmp_path / "other.pt")
    assert done.returncode == 3 and "none.pt" in done.stderr and list(tmp_path.iterdir()) == [new]


def test_public_headers_compile_where_installed(prefix, tmp_path):
    """They include nothing that is not installed with them. test_headers.py tells whether each stands alone."""
    torch_include = Path(torch.__file__).parent / "include"
    headers = sorted((prefix / "include" / "tsmem").iterdir())
    source = tmp_path / "all.cpp"
    source.write_text("".join(f"#include <tsmem/{header.name}>\n" for header in headers))
    done = run("c++", "-std=c++20", "-fsyntax-only", "-I", prefix / "include", "-I", torch_include, "-I", torch_include / "torch/csrc/api/include", source)
    assert headers and done.returncode == 0, done.stderr


def test_linker_keeps_the_library(programs):
    """The program names no symbol of it, so a plain link would drop it."""
    assert "libtsmem_ops.so" in output(run("readelf", "-d", programs / "train"))
    assert "libtsmem_ops.so" not in output(run("readelf", "-d", programs / "load_plain"))


def test_train_gives_the_losses_of_the_original(programs, files):
    losses = [[float(v) for v in re.findall(r"loss (\S+)", output(run(programs / "train", f, "3")))] for f in files]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[0][0] != losses[0][2]


def test_train_of_an_imported_program(programs, files, prefix, tmp_path):
    """Exported, imported and trained from C++: the losses of the scripted model, with the operators and without."""
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(models.build("tv:resnet18").train(), (torch.rand(4, 3, 64, 64),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "m.pt2")
    output(run(prefix / "bin" / "tsmem", "import", tmp_path / "m.pt2", "-o", tmp_path / "m.pt"))
    output(run(prefix / "bin" / "tsmem", "rewrite", tmp_path / "m.pt", "-o", tmp_path / "m.mem.pt"))
    losses = [[float(v) for v in re.findall(r"loss (\S+)", output(run(programs / "train", f, "3", "6")))]
              for f in (files[0], tmp_path / "m.pt", tmp_path / "m.mem.pt")]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[2] == pytest.approx(losses[0], rel=0.02)


def test_program_without_the_library_says_what_is_missing(programs, files):
    done = run(programs / "load_plain", files[1])
    assert done.returncode == 1 and "Unknown builtin op: tsmem::" in done.stderr
    assert "gradients" in output(run(programs / "load_plain", files[0]))


def test_ld_preload_and_dlopen(programs, files, prefix):
    library = str(prefix / "lib" / "libtsmem_ops.so")
    expected = output(run(programs / "load_plain", files[0]))
    assert output(run(programs / "load_plain", files[1], library)) == expected
    # LD_PRELOAD splits at spaces.
    assert output(run(programs / "load_plain", files[1], env={"LD_PRELOAD": str(BUILD / "lib" / "libtsmem_ops.so")})) == expected


def test_train_py_of_a_source_tree(files):
    code = f"import sys, runpy, tsmem; sys.argv = ['train.py', {str(files[1])!r}, '2', '2', '48']; runpy.run_path({str(ROOT / 'examples' / 'train.py')!r}, run_name='__main__')"
    text = output(run(sys.executable, "-c", code, env={"PYTHONPATH": str(ROOT / "python"), "TSMEM_OPS": str(conftest.library())}))
    assert text.count("loss") == 2


def test_digits(tmp_path):
    """One epoch of the original, the rewritten and the half-precision model side by side: the same start, less memory, a picture."""
    text = output(run(sys.executable, ROOT / "examples" / "digits.py", "--epochs", "1", "--batch", "16", "--out", tmp_path,
                      env={"TSMEM_BIN": str(BUILD / "bin" / "tsmem"), "TSMEM_OPS": str(conftest.library())}))
    results = json.loads((tmp_path / "digits.json").read_text())
    original, rewritten, half = results.values()
    # Later losses differ more: training amplifies rounding.
    assert rewritten["step_losses"][:2] == pytest.approx(original["step_losses"][:2], rel=1e-4)
    assert half["step_losses"][:2] == pytest.approx(original["step_losses"][:2], rel=0.02)
    for r in results.values():
        assert r["step_losses"][-1] < r["step_losses"][0]
    assert rewritten["saved_bytes"] < 0.6 * original["saved_bytes"] and half["saved_bytes"] < 0.4 * original["saved_bytes"]
    # The plan holds in training; 4 KiB for the loss, which the plan does not know.
    share = int(re.search(r"(\d+)%", list(results)[2])[1]) / 100
    assert half["peak_bytes"] <= share * original["peak_bytes"] + 4096
    assert all(name in text for name in results)
    xml.etree.ElementTree.parse(tmp_path / "digits.svg")


@pytest.mark.parametrize("options", ((), ("--checkpoint", "layer*.*")))
def test_distributed_data_parallel(files, tmp_path, options):
    """Gradients averaged over two processes are the original's."""
    new = tmp_path / "new.pt"
    output(run(BUILD / "bin" / "tsmem", "rewrite", files[0], "-o", new, *options))
    gradients = []
    for model in (files[0], new):
        out = tmp_path / (model.stem + ".grads.pt")
        code = f"import sys, runpy, tsmem; sys.argv = sys.argv[1:]; runpy.run_path({str(ROOT / 'examples' / 'train_ddp.py')!r}, run_name='__main__')"
        (tmp_path / "run.py").write_text(code)
        text = output(run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "run.py", "train_ddp.py", model, "2", "2", "48",
                          "--gradients", out, env={"PYTHONPATH": str(ROOT / "python"), "TSMEM_OPS": str(conftest.library()), "OMP_NUM_THREADS": "1"}))
        assert text.count("loss") == 2
        gradients.append(torch.load(out))
    assert gradients[0].keys() == gradients[1].keys()
    scale = max(g.norm().item() for g in gradients[0].values())
    for name, g in gradients[0].items():
        assert (gradients[1][name] - g).norm() <= 5e-2 * max(g.norm().item(), 1e-3 * scale), name
