"""`pip install .`: the wheel is built, installed into an environment of its own, and used with nothing of the source tree on the path."""
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TORCH = Path(torch.__file__).parent


def run(*command, **options):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TSMEM_OPS", "TSMEM_BIN")}
    environment.update(options.pop("env", {}))
    return subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, cwd="/", **options)


def output(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A Python with torch and highspy beside the installed wheel, as pip leaves them; these two are linked in, not copied."""
    folder = tmp_path_factory.mktemp("package")
    # build-wheel stays, and ccache knows what `make build` compiled.
    output(run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", folder, ROOT, env={"TSMEM_TORCH": str(TORCH)}))
    output(run(sys.executable, "-m", "venv", "--without-pip", folder / "env"))
    python = folder / "env" / "bin" / "python"
    site = Path(output(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")))
    (site / "torch").symlink_to(TORCH)
    (site / "highspy").symlink_to(Path(importlib.util.find_spec("highspy").origin).parent)
    (site / "others.pth").write_text(str(TORCH.parent) + "\n")  # what torch itself imports
    (wheel,) = folder.glob("*.whl")
    output(run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel))
    return python


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
    assert output(run(environment, "-c", "import tsmem; print(tsmem.library_path())")) == str(site / "libtsmem_ops.so")
    assert output(run(environment, "-c", "import tsmem; print(tsmem.tool_path())")) == str(site / "bin" / "tsmem")
    dynamic = output(run("readelf", "-d", site / "libtsmem_ops.so"))
    assert "$ORIGIN/../torch/lib" in dynamic and str(ROOT) not in dynamic
    dynamic = output(run("readelf", "-d", site / "bin" / "tsmem"))
    assert "$ORIGIN/../../torch/lib" in dynamic and "$ORIGIN/../../highspy" in dynamic
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
