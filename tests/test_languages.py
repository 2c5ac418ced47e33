"""docs/languages.md: its linker lines, LD_PRELOAD and loading by a runtime, in programs that train through C functions over LibTorch, as the languages' libraries do."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import command_line
import conftest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "languages"
PAGE = (ROOT / "docs" / "languages.md").read_text()
TORCH = Path(torch.__file__).parent
OPS = conftest.library()


def run(*command, cwd=None, **environment):
    return subprocess.run([str(c) for c in command], env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, cwd=cwd)


def output(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def line(pattern):
    """The one place of the page that this matches, with the library's folder for /path."""
    (found,) = re.findall(pattern, PAGE)
    return found.replace("/path", str(OPS.parent))


def tool(name):
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed: nothing links or runs the program of its language")
    return name


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    """Linked with LibTorch, and not with tsmem."""
    folder = tmp_path_factory.mktemp("bindings")
    compiler = ["ccache", "g++"] if shutil.which("ccache") else ["g++"]
    flags = ["-std=c++20", "-fPIC", "-isystem", TORCH / "include", "-isystem", TORCH / "include/torch/csrc/api/include"]
    output(run(*compiler, *flags, "-c", SOURCES / "bindings.cpp", "-o", folder / "bindings.o", cwd=SOURCES))
    output(run("g++", "-shared", folder / "bindings.o", "-o", folder / "libbindings.so", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}",
               "-Wl,--allow-shlib-undefined"))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and itself rewritten."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
    torch.jit.script(model).save(str(folder / "model.pt"))
    command_line.runs("rewrite", folder / "model.pt", "-o", folder / "model.mem.pt")
    return folder / "model.pt", folder / "model.mem.pt"


def trains_alike(program, files, folder, **environment):
    """The rewritten file trains to the original's losses and weights, and what is saved gives those back without tsmem's operators."""
    trained = [folder / f"trained-{file.name}" for file in files]
    said = [output(run(*program, file, out, **environment)) for file, out in zip(files, trained)]
    losses = [[float(v) for v in re.findall(r"loss (\S+)", text)] for text in said]
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)

    pytorch = folder / "pytorch.pt"
    command_line.runs("rewrite", trained[1], "-o", pytorch, "--restore", "--force")
    weights = [torch.jit.load(str(file)).state_dict() for file in (trained[0], pytorch)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5)


def lacks_the_library(program, files, folder):
    done = run(*program, files[1], folder / "none.pt")
    assert done.returncode == 1 and "Unknown builtin op: tsmem::" in done.stderr, done.stdout + done.stderr
    assert not (folder / "none.pt").exists()


def needed(program):
    return re.findall(r"NEEDED.*\[(.*)\]", output(run("readelf", "-d", program)))


def preloads(program, files, folder):
    """Built without the library, the program doesn't know the operators; preloaded, it does."""
    assert OPS.name not in needed(program)
    lacks_the_library([program], files, folder)
    trains_alike([program], files, folder, LD_PRELOAD=str(OPS))


def of_bindings(folder):
    return [f"-L{folder}", "-lbindings", f"-Wl,-rpath,{folder}", "-Wl,--allow-shlib-undefined"]


LINK = r"\| link it: `(.*?)`"


def test_fortran(bindings, files, tmp_path):
    compiler = tool("gfortran")

    def build(name, *flags):
        output(run(compiler, SOURCES / "main.f90", "-o", tmp_path / name, *of_bindings(bindings), *flags))
        return tmp_path / name

    preloads(build("plain"), files, tmp_path)
    # Where the linker's default is --as-needed, as Ubuntu's, it drops the library.
    assert OPS.name not in needed(build("dropped", "-Wl,--as-needed", f"-L{OPS.parent}", "-ltsmem_ops"))
    linked = build("linked", "-Wl,--as-needed", *line(LINK).split())
    assert OPS.name in needed(linked)
    trains_alike([linked], files, tmp_path)


def test_rust(bindings, files, tmp_path):
    cargo = tool("cargo")
    (tmp_path / "Cargo.toml").write_text('[package]\nname = "train"\nversion = "0.1.0"\nedition = "2021"\n\n[[bin]]\nname = "train"\npath = "main.rs"\n')
    shutil.copy(SOURCES / "main.rs", tmp_path)

    def build(name, *lines):
        ours = [f'println!("cargo:rustc-link-search=native={bindings}");', 'println!("cargo:rustc-link-lib=dylib=bindings");',
                f'println!("cargo:rustc-link-arg=-Wl,-rpath,{bindings},--allow-shlib-undefined");']
        (tmp_path / "build.rs").write_text("fn main() {\n" + "\n".join([*ours, *lines]) + "\n}\n")
        output(run(cargo, "build", "--offline", "--quiet", "--target-dir", tmp_path / name, cwd=tmp_path))
        return tmp_path / name / "debug" / "train"

    preloads(build("plain"), files, tmp_path)
    # What one would write first: rustc has the linker drop it.
    assert OPS.name not in needed(build("dropped", f'println!("cargo:rustc-link-search=native={OPS.parent}");', 'println!("cargo:rustc-link-lib=dylib=tsmem_ops");'))
    linked = build("linked", line(r'(println!\("cargo:.*\);)'))
    assert OPS.name in needed(linked)
    trains_alike([linked], files, tmp_path)


def test_go(bindings, files, tmp_path):
    go = tool("go")
    (tmp_path / "go.mod").write_text("module train\n\ngo 1.19\n")

    def build(name, *lines):
        text = (SOURCES / "main.go").read_text()
        (tmp_path / "main.go").write_text(text.replace('import "C"', "\n".join([*lines, 'import "C"']), 1))
        output(run(go, "build", "-o", tmp_path / name, ".", cwd=tmp_path, CGO_ENABLED="1", CGO_LDFLAGS=" ".join(of_bindings(bindings)), GOCACHE=str(tmp_path / "cache"),
                   CGO_LDFLAGS_ALLOW="-Wl,--allow-shlib-undefined"))
        return tmp_path / name

    preloads(build("plain"), files, tmp_path)
    linked = build("linked", line(r"(// #cgo LDFLAGS: .*)"))
    assert OPS.name in needed(linked)
    trains_alike([linked], files, tmp_path)


RUNTIME = """
import ctypes, os, sys
for library in sys.argv[3:]:
    ctypes.CDLL(library, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
assert "torch" not in sys.modules
sys.exit(ctypes.CDLL(sys.argv[3]).train(sys.argv[1].encode(), sys.argv[2].encode()))
"""


def test_a_runtime_that_loads_libraries(bindings, files, tmp_path):
    """dlopen as .NET's NativeLibrary.Load calls it, first of the bindings and then of the operators, in a process that has no LibTorch of its own."""

    def program(*libraries):
        script = tmp_path / f"run{len(libraries)}.py"
        script.write_text(RUNTIME.replace("sys.argv[3:]", repr([str(p) for p in libraries])).replace("sys.argv[3]", repr(str(bindings / "libbindings.so"))))
        return [sys.executable, "-I", "-S", script]

    lacks_the_library(program(bindings / "libbindings.so"), files, tmp_path)
    trains_alike(program(bindings / "libbindings.so", OPS), files, tmp_path)
