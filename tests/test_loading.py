"""The Python package from the source tree: finding the library, loading it once, `tsmem.rewrite` and its errors.

Each loads in a process of its own: a process can load the operators once.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import conftest
import models

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = str(conftest.library())


def python(code, *, env=None, flags=()):
    """Runs code with the package on the path; the result has stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TSMEM_OPS": LIBRARY, **(env or {})}
    return subprocess.run([sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True)


def said(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory):
    """A file that uses one operator, written without the tool."""
    conftest.load()

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.tsmem.conv2d(x, self.conv.weight, self.conv.bias)

    path = tmp_path_factory.mktemp("loading") / "block.pt"
    torch.jit.script(Block()).save(str(path))
    return str(path)


def test_without_the_library_pytorch_names_the_operator(rewritten):
    """docs/troubleshooting.md quotes this."""
    done = python(f"import torch; torch.jit.load({rewritten!r})", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode != 0 and "Unknown builtin op: tsmem::conv2d" in done.stderr
    assert "Unknown builtin op: tsmem::" in (ROOT / "docs/troubleshooting.md").read_text()


def test_import_tsmem_loads_the_operators(rewritten):
    assert said(python(f"import tsmem, torch; torch.jit.load({rewritten!r}); print(tsmem.library_path())")) == [LIBRARY]


def test_import_after_load_library_from_another_path_loads_nothing_twice(tmp_path):
    """A second copy would end the process."""
    copy = tmp_path / "copy.so"
    copy.write_bytes(Path(LIBRARY).read_bytes())
    code = f"import torch; torch.ops.load_library({str(copy)!r}); import tsmem; print(open('/proc/self/maps').read().count({LIBRARY!r}))"
    assert said(python(code)) == ["0"]


def test_preloaded_library_is_not_loaded_again():
    assert said(python("import tsmem; print('fine')", env={"LD_PRELOAD": LIBRARY})) == ["fine"]


def test_missing_library_is_one_sentence():
    done = python("import tsmem", env={"TSMEM_OPS": "/no/such/library.so"})
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == "tsmem._error.Error: TSMEM_OPS names '/no/such/library.so', which does not exist."


def test_not_a_library_is_one_sentence(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    done = python("import tsmem", env={"TSMEM_OPS": str(tmp_path / "text.so")})
    assert done.returncode != 0 and "text.so can't be loaded: " in done.stderr.strip().splitlines()[-1]


@pytest.fixture
def other_torch(tmp_path):
    """A library that says that it was built for another torch."""
    (tmp_path / "lib.so").write_bytes(Path(LIBRARY).read_bytes())
    (tmp_path / "lib.torch").write_text("2.99.1+cpu\n")
    return str(tmp_path / "lib.so")


def test_library_for_another_torch_is_refused(other_torch):
    done = python("import tsmem", env={"TSMEM_OPS": other_torch})
    assert done.returncode != 0 and "built for torch 2.99 and this is torch " + torch.__version__ in done.stderr


@pytest.mark.parametrize("flags", [(), ("-W", "error")])
def test_autoload_warns_and_never_raises(other_torch, flags):
    done = python("import torch, _tsmem_autoload; _tsmem_autoload.load(); print('on')", env={"TSMEM_OPS": other_torch}, flags=flags)
    assert said(done) == ["on"]
    assert done.stderr.count("tsmem: its operators are not loaded: the library was built for torch 2.99") == 1


def test_version_is_the_tools():
    tool = subprocess.run([sys.executable, "-m", "tsmem", "--version"], env={**os.environ, "PYTHONPATH": str(ROOT / "python")}, capture_output=True, text=True)
    version = said(python("import tsmem; print(tsmem.__version__)"))[0]
    assert tool.returncode == 0 and version in tool.stdout
    assert f"project(tsmem VERSION {version} " in (ROOT / "CMakeLists.txt").read_text()


@pytest.fixture(scope="module")
def tsmem():
    conftest.load()
    import tsmem

    return tsmem


def flags_of(module):
    return ([(n, p.requires_grad, p.device) for n, p in module.named_parameters()], [(n, m.training) for n, m in module.named_modules()])


def test_rewrite_and_restore(tsmem):
    module = models.make("frozen-backbone")
    before = module.inlined_graph.copy()
    new = tsmem.rewrite(module)
    assert "tsmem::" in str(new.inlined_graph) and "tsmem::" not in str(module.inlined_graph)
    assert flags_of(new) == flags_of(module)
    old, state = module.state_dict(), new.state_dict()
    assert list(state) == list(old) and all(torch.equal(state[k], old[k]) for k in old)
    x = models.inputs("frozen-backbone")[0]
    torch.testing.assert_close(new(x), module(x), rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        for p in new.parameters():
            p.add_(1)
    back = tsmem.restore(new)
    assert "tsmem::" not in str(back.inlined_graph)
    assert all(torch.equal(p, q) for p, q in zip(back.parameters(), new.parameters()))
    assert sum(1 for _ in back.inlined_graph.nodes()) == sum(1 for _ in before.nodes())


def test_rewrite_takes_the_tools_options(tsmem):
    module = models.make("cnn")
    new = tsmem.rewrite(module, level="ops", freeze=["conv1.*", "bn1.*"], input=models.inputs("cnn"), seed=3)
    assert [n for n, p in new.named_parameters() if not p.requires_grad] == ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"]
    assert "tsmem::" in str(tsmem.rewrite(module, input="4x3x32x32").inlined_graph)


def test_errors_are_the_tools_sentence(tsmem):
    module = models.make("cnn")
    with pytest.raises(tsmem.Error, match="no-such-pattern") as error:
        tsmem.rewrite(module, only="no-such-pattern")
    assert error.value.kind == "request" and "\n" not in str(error.value) and "'tsmem " not in str(error.value)
    with pytest.raises(tsmem.Error, match="no option 'force'"):
        tsmem.rewrite(module, force=True)
    with pytest.raises(tsmem.Error, match="torch.jit.script"):
        tsmem.rewrite(torch.nn.Linear(2, 2))
    assert tsmem.rewrite(module, module="**") is not module  # the option, beside the argument
    with pytest.raises(tsmem.Error, match="^An int was given"):
        tsmem.verify(module, 3)
    with pytest.raises(tsmem.Error, match="A str was given"):
        tsmem.rewrite("model.pt")


def test_a_second_copy_of_the_library_leaves_the_operators_to_the_first(tmp_path, rewritten):
    copy = tmp_path / "libtsmem_ops.so"
    copy.write_bytes(Path(LIBRARY).read_bytes())
    code = f"""
import torch
torch.ops.load_library({LIBRARY!r})
torch.ops.load_library({str(copy)!r})
m = torch.jit.load({str(rewritten)!r})
m(torch.randn(1, 3, 8, 8)).sum().backward()
print("fine")
"""
    done = python(code, flags=("-W", "ignore::FutureWarning"))  # torch.jit.load's own
    assert said(done)[-1] == "fine" and "Warn" not in done.stderr, done.stderr
