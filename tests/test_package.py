"""`pip install .`: the wheel is built, installed into an environment of its own, and used with nothing of the source tree on the path."""
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TORCH = Path(torch.__file__).parent
MINOR = ".".join(torch.__version__.split(".")[:2])
BUILT = f"torch-{MINOR}"  # the folder in the package with what was built for this torch


def run(*command, **options):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TSMEM_OPS", "TSMEM_BIN")}
    environment.update(options.pop("env", {}))
    return subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, cwd="/", **options)


def output(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # The folder stays, beside build/: ccache knows what `make build` compiled.
    output(run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", folder, "-C", f"build-dir=build-wheel-{MINOR}", ROOT,
               env={"TSMEM_TORCH": str(TORCH)}))
    (made,) = folder.glob("*.whl")
    return made


def site_of(python):
    return Path(output(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")))


def make_environment(folder, wheel, beside):
    """A Python with the wheel; torch and highspy lie beside it, as pip leaves them (linked, not copied), or in another folder of Python's path."""
    output(run(sys.executable, "-m", "venv", "--without-pip", folder / "env"))
    python = folder / "env" / "bin" / "python"
    site = site_of(python)
    if beside:
        (site / "torch").symlink_to(TORCH)
        (site / "highspy").symlink_to(Path(importlib.util.find_spec("highspy").origin).parent)
    (site / "others.pth").write_text(str(TORCH.parent) + "\n")  # what torch itself imports
    output(run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel))
    return python


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("package"), wheel, beside=True)


@pytest.fixture(scope="module")
def files(environment, tmp_path_factory):
    """A model, and what the installed command makes of it."""
    folder = tmp_path_factory.mktemp("files")
    original, new = folder / "resnet18.pt", folder / "resnet18.mem.pt"
    output(run(sys.executable, ROOT / "fixtures" / "models.py", "tv:resnet18", "-o", original))
    output(run(environment.parent / "tsmem", "rewrite", original, "-o", new))
    return original, new


TRAIN = "import torch; m = torch.jit.load({path!r}); m(torch.randn(2, 3, 64, 64)).square().sum().backward(); print(len([p for p in m.parameters() if p.grad is not None]))"


@pytest.mark.parametrize("flags", [(), ("-I",), ("-W", "error::RuntimeWarning")])
def test_script_that_only_imports_torch_trains_a_rewritten_file(environment, files, flags):
    code = TRAIN.format(path=str(files[1]))
    assert int(output(run(environment, *flags, "-c", code))) > 50


def test_train_example(environment, files):
    lines = output(run(environment, ROOT / "examples" / "train.py", files[1], "2", "2", "48")).splitlines()
    assert len(lines) == 2 and all("loss" in line for line in lines)


def test_spawned_process_trains_it_too(environment, files, tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def work(rank, path):\n"
        "    torch.jit.load(path)(torch.randn(2, 3, 64, 64)).sum().backward()\n"
        f"if __name__ == '__main__': mp.spawn(work, ({str(files[1])!r},), nprocs=2); print('both')\n"
    )
    assert output(run(environment, script)) == "both"


def test_autoload_can_be_turned_off(environment, files):
    done = run(environment, "-c", TRAIN.format(path=str(files[1])), env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode != 0 and "Unknown builtin op: tsmem::" in done.stderr
    done = run(environment, "-c", "import tsmem; " + TRAIN.format(path=str(files[1])), env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert int(output(done)) > 50


def test_everything_comes_from_the_installed_package(environment):
    site = Path(output(run(environment, "-c", "import tsmem; print(tsmem.__path__[0])")))
    assert environment.parent.parent in site.parents
    assert output(run(environment, "-c", "import tsmem; print(tsmem.library_path())")) == str(site / BUILT / "libtsmem_ops.so")
    assert output(run(environment, "-c", "import tsmem; print(tsmem.tool_path())")) == str(site / BUILT / "bin" / "tsmem")
    dynamic = output(run("readelf", "-d", site / BUILT / "libtsmem_ops.so"))
    assert "$ORIGIN/../../torch/lib" in dynamic and str(ROOT) not in dynamic
    dynamic = output(run("readelf", "-d", site / BUILT / "bin" / "tsmem"))
    assert "$ORIGIN/../../../torch/lib" in dynamic and "$ORIGIN/../../../highspy" in dynamic
    assert (site / "share" / "cmake" / "tsmem" / "tsmemConfig.cmake").is_file()


def test_broken_library_leaves_import_torch_alive(environment, tmp_path):
    (tmp_path / "broken.so").write_text("nothing")
    done = run(environment, "-c", "import torch; print(torch.ones(2).sum().item())", env={"TSMEM_OPS": str(tmp_path / "broken.so")})
    assert output(done) == "2.0"
    assert done.stderr.count("tsmem: its operators are not loaded") == 1


def test_rewrite_and_command_of_the_installed_package(environment, files):
    code = f"import torch, tsmem; m = tsmem.rewrite(torch.jit.load({str(files[0])!r})); print('tsmem::' in str(m.inlined_graph))"
    assert output(run(environment, "-c", code)) == "True"
    assert output(run(environment.parent / "tsmem", "--version")) == output(run(environment, "-m", "tsmem", "--version"))
    done = run(environment.parent / "tsmem", "diff", *files, "--format", "json")
    assert done.returncode == 1 and json.loads(done.stdout)["equal"] is False


def test_cmake_package_of_the_wheel(environment, tmp_path):
    """A C++ program finds library and torch in the environment; configuring is enough here, test_examples.py builds."""
    site = Path(output(run(environment, "-c", "import tsmem; print(tsmem.__path__[0])")))
    text = output(run("cmake", "-S", ROOT / "examples", "-B", tmp_path, f"-Dtsmem_DIR={site / 'share' / 'cmake' / 'tsmem'}"))
    assert str(TORCH.resolve()) in text


def test_cmake_package_says_which_torch_it_lacks(environment, tmp_path):
    site = Path(output(run(environment, "-c", "import tsmem; print(tsmem.__path__[0])")))
    (tmp_path / "version.py").write_text("__version__ = '2.99.0'\n")
    done = run("cmake", "-S", ROOT / "examples", "-B", tmp_path / "build", f"-Dtsmem_DIR={site / 'share' / 'cmake' / 'tsmem'}", f"-DTSMEM_TORCH={tmp_path}")
    text = " ".join(done.stderr.split())
    assert done.returncode != 0 and "there is no build for the torch in" in text and f"only {BUILT}" in text, text


def test_torch_and_highspy_in_another_folder(wheel, files, tmp_path):
    """With --user, --system-site-packages or a .pth file they are not beside the package, where the program looks by itself."""
    python = make_environment(tmp_path, wheel, beside=False)
    new = tmp_path / "new.pt"
    output(run(python.parent / "tsmem", "rewrite", files[0], "-o", new))
    assert int(output(run(python, "-c", TRAIN.format(path=str(new))))) > 50
    code = f"import torch, tsmem; m = tsmem.rewrite(torch.jit.load({str(files[0])!r})); print('tsmem::' in str(m.inlined_graph))"
    assert output(run(python, "-c", code)) == "True"


def test_another_torch_is_refused_in_one_sentence(wheel, tmp_path):
    """`import torch` goes on with a warning; the command and `import tsmem` end."""
    python = make_environment(tmp_path, wheel, beside=True)
    site = site_of(python) / "tsmem"
    (site / BUILT).rename(site / "torch-2.9")
    sentence = f"tsmem is installed for torch 2.9, and this is torch {torch.__version__}: install one of those, or a tsmem that was built for this one."
    done = run(python, "-c", "import torch; print('on')")
    assert output(done) == "on" and done.stderr.count(sentence) == 1
    done = run(python.parent / "tsmem", "--version")
    assert done.returncode == 3 and done.stderr == f"tsmem: {sentence}\n"
    done = run(python, "-c", "import tsmem", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == f"tsmem._error.Error: {sentence}"


def test_uninstalling_leaves_nothing(wheel, files, tmp_path):
    def contents(python):
        return {p for p in python.parent.parent.rglob("*") if "__pycache__" not in p.parts}

    output(run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"))
    python = make_environment(tmp_path, wheel, beside=True)
    output(run(python.parent / "tsmem", "inspect", files[1]))
    output(run(sys.executable, "-m", "pip", "--python", python, "uninstall", "--yes", "--quiet", "tsmem"))
    left = {p.relative_to(tmp_path / "env") for p in contents(python)} - {p.relative_to(tmp_path / "bare") for p in contents(tmp_path / "bare" / "bin" / "python")}
    assert {p.name for p in left} == {"torch", "highspy", "others.pth"}
    assert not [p for p in (tmp_path / "env").rglob("__pycache__/*") if "tsmem" in p.name]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import sys; sys.path.insert(0, 'python'); import build_backend; print(build_backend.build_sdist({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def test_sdist_needs_no_headers_of_the_system(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    text = output(run("cmake", "-S", source, "-B", tmp_path / "build", "-G", "Ninja", "-DCMAKE_IGNORE_PATH=/usr/include", "-DTSMEM_TESTS=OFF", "-DTSMEM_CUDA=OFF",
                      f"-DTSMEM_TORCH={TORCH}"))
    assert "fetching" not in text
    assert f"-isystem {source}/third_party" in (tmp_path / "build" / "build.ninja").read_text()


def test_isolated_build_takes_the_torch_that_is_installed(tmp_path, wheel):
    """pip hides the environment from an isolated build; another torch is several GB. The rest of the build is the same with and without."""
    python = make_environment(tmp_path, wheel, beside=True)
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r}); import build_backend; print(build_backend._installed_torch())"
    # What pip sets: the environment's own folder is off the path.
    isolated = tmp_path / "isolated"
    shutil.copytree(Path(importlib.util.find_spec("scikit_build_core").origin).parent, isolated / "scikit_build_core")
    for name in ("packaging", "pathspec"):
        shutil.copytree(Path(importlib.util.find_spec(name).origin).parent, isolated / name)
    (isolated / "sitecustomize.py").write_text(f"import sys\nsys.path = [p for p in sys.path if not p.startswith({str(python.parent.parent)!r}) and p != {str(TORCH.parent)!r}]\n")
    found = run(python, "-c", code, env={"PYTHONPATH": str(isolated), "PYTHONNOUSERSITE": "1"})
    assert output(found) == str(site_of(python) / "torch")
    done = run(python, "-c", "import torch", env={"PYTHONPATH": str(isolated), "PYTHONNOUSERSITE": "1"})
    assert done.returncode == 1 and "No module named 'torch'" in done.stderr


REQUIRED = """
import json, sys
sys.path.insert(0, {python!r})
import build_cuda
build_cuda.nvcc_of_the_machine = lambda: {nvcc!r}
print(json.dumps([build_cuda.requires({torch!r}), build_cuda.settings()]))
"""


def required(torch=None, nvcc=None, **environment):
    """What a build installs for the kernels for CUDA, and what CMake is told."""
    code = REQUIRED.format(python=str(ROOT / "python"), torch=torch, nvcc=nvcc)
    return json.loads(output(run(sys.executable, "-c", code, env={"TSMEM_CUDA": "ON", **environment})))


@pytest.mark.parametrize("version, toolkit", [("'13.2'", ["cuda-toolkit[cccl,nvcc]==13.2.*"]), ("'12.8'", []), ("None", [])])
def test_nvcc_comes_from_pypi_where_the_machine_has_none(tmp_path, version, toolkit):
    (tmp_path / "version.py").write_text(f"__version__ = '2.15.0'\ncuda: Optional[str] = {version}\n")
    frontend = [line for line in (ROOT / "python" / "requirements.txt").read_text().splitlines() if line.startswith("nvidia-cudnn-frontend")]
    assert required(str(tmp_path))[0] == frontend + toolkit
    assert required(str(tmp_path), nvcc="/usr/bin/nvcc")[0] == frontend
    assert required()[0] == [*frontend, "cuda-toolkit[cccl,nvcc]"]  # of the version that the torch which is fetched has
    assert required(str(tmp_path), TSMEM_CUDA="OFF") == [[], {"cmake.define.TSMEM_CUDA": "OFF"}]


def test_cmake_is_told_of_nvcc_from_pypi(tmp_path):
    nvcc, information = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc", tmp_path / "nvidia_cuda_nvcc-13.2.86.dist-info"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-nvcc\nVersion: 13.2.86\n")
    (information / "RECORD").write_text("nvidia/cu13/bin/nvcc,,\n")
    assert required(PYTHONPATH=str(tmp_path))[1]["cmake.define.CMAKE_CUDA_COMPILER"] == str(nvcc)
    assert "cmake.define.CMAKE_CUDA_COMPILER" not in required(nvcc="/usr/bin/nvcc", PYTHONPATH=str(tmp_path))[1]


def test_the_highspy_that_pip_takes_has_the_library(tmp_path):
    """highspy 1.16 came without it, and pip takes the newest that a requirement allows."""
    requirements = re.findall(r'"(highspy[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert len(requirements) == 2 and requirements[0] == requirements[1]
    output(run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, requirements[0]))
    (taken,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(taken) as archive:
        assert "highspy/libhighs.so.1" in archive.namelist()


def test_a_highspy_without_the_library_is_refused(tmp_path):
    (tmp_path / "highspy").mkdir()
    (tmp_path / "highspy" / "__init__.py").touch()
    missing = tmp_path / "highspy" / "libhighs.so.1"
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r}); import build_backend; build_backend.build_wheel({str(tmp_path)!r})"
    done = run(sys.executable, "-c", code, env={"PYTHONPATH": str(tmp_path), "TSMEM_TORCH": str(TORCH)})
    assert done.returncode == 1
    assert done.stderr == f"tsmem's planner is built against the library in highspy, and {missing} does not exist: install highspy 1.15.1.\n"
    done = run("cmake", "-S", ROOT, "-B", tmp_path / "build", f"-DTSMEM_TORCH={TORCH}", f"-DTSMEM_HIGHS={missing}")
    assert done.returncode == 1 and "libhighs.so.1 was not found:" in done.stderr


def versions():
    text = (ROOT / "python" / "torch-versions.txt").read_text()
    return [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]


def test_one_range_of_versions_everywhere():
    oldest, newest = ([int(n) for n in v.split(".")[:2]] for v in versions())
    assert f'"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"' in (ROOT / "pyproject.toml").read_text()
    for page in ("README.md", "docs/loading.md"):
        assert f"torch {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}" in (ROOT / page).read_text(), page


def test_the_newest_is_the_default():
    oldest, newest = versions()
    (default,) = re.findall(r"^(\S+) \S+ default$", (ROOT / "python" / "torch-versions.txt").read_text(), re.MULTILINE)
    assert default == newest
    assert f"torch {newest} into `.venv`" in (ROOT / "README.md").read_text()
    text = (ROOT / "docs" / "testing.md").read_text()
    assert f"the newest: {newest}\n" in text and f"the oldest, {oldest}, in .venv-{oldest[:4]} and build-{oldest[:4]}\n" in text


@pytest.mark.parametrize("version", ["2.10.0", "2.99.1+cpu"])
def test_a_torch_out_of_the_range_is_refused_by_set_up_and_cmake(tmp_path, version):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").touch()
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    oldest, newest = (".".join(v.split(".")[:2]) for v in versions())
    sentence = f"TSMEM_TORCH='{tmp_path}' is torch {version}; tsmem works with {oldest} to {newest}: install one of these."
    done = run(ROOT / "cmake" / "setup.sh", env={"TSMEM_TORCH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr == f"set-up: {sentence}\n"
    done = run("cmake", "-S", ROOT, "-B", tmp_path / "build", f"-DTSMEM_TORCH={tmp_path}")
    assert done.returncode == 1 and sentence in " ".join(done.stderr.split())


def test_wheels_for_several_versions_are_put_together(wheel, tmp_path):
    """The one for each torch has a folder of its own; what they share has to be the same."""
    sys.path.insert(0, str(ROOT / "cmake" / "wheel"))
    import make_wheel

    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(other, "w") as made:
        for info in given.infolist():
            made.writestr(info.filename.replace(BUILT, "torch-2.9"), given.read(info))
    (tmp_path / "out").mkdir()
    both = make_wheel.put_together([wheel, other], tmp_path / "out")
    python = make_environment(tmp_path, both, beside=True)
    assert sorted(p.name for p in (site_of(python) / "tsmem").glob("torch-*")) == sorted([BUILT, "torch-2.9"])
    assert output(run(python.parent / "tsmem", "--version")) == output(run(python, "-m", "tsmem", "--version"))
    assert output(run(python, "-c", "import tsmem; print(tsmem.library_path())")).endswith(f"/{BUILT}/libtsmem_ops.so")
    with zipfile.ZipFile(tmp_path / "third.whl", "w") as made:
        made.writestr("tsmem/__init__.py", "different")
    with pytest.raises(SystemExit, match="tsmem/__init__.py is not the same"):
        make_wheel.put_together([wheel, tmp_path / "third.whl"], tmp_path / "out")
