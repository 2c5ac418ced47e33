"""libtsmem_ops_cuda.so is looked for beside libtsmem_ops.so when an op first sees a CUDA tensor. Fake ones do: no device is needed."""

import os
import pathlib
import shutil
import subprocess
import sys

import conftest
import pytest
import torch

CUDA_LIBRARY = "libtsmem_ops_cuda.so"
CODE = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.ops.load_library(sys.argv[1])
loaded = lambda: "libtsmem_ops_cuda.so" in open("/proc/self/maps").read()
norm = lambda x: torch.ops.tsmem.batch_norm_act(x, None, None, None, None, True, 0.1, 1e-5, True, "relu", [])
norm(torch.randn(2, 8, 4, 4, requires_grad=True))
assert not loaded()
with FakeTensorMode():
    x = torch.empty(2, 8, 4, 4, device="cuda", requires_grad=True)
    shapes = [tuple(norm(x).shape), tuple(torch.ops.tsmem.max_pool2d(x, [2, 2]).shape)]
assert shapes == [(2, 8, 4, 4), (2, 8, 2, 2)], shapes
registered = torch._C._dispatch_has_kernel_for_dispatch_key("tsmem::_batch_norm_act_forward", "CUDA")
print(loaded(), registered)
"""


def run(library):
    """Whether the CUDA library is loaded, and its kernels are registered; and what was said."""
    # Outside the source tree, and without the package that loads another copy.
    command = [sys.executable, "-c", CODE, str(library)]
    done = subprocess.run(command, cwd=library.parent, capture_output=True, text=True, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if "tsmem: " in line]


@pytest.fixture
def copied(tmp_path):
    if torch.version.cuda is None:
        pytest.skip("needs a torch built with CUDA")
    return pathlib.Path(shutil.copy(conftest.library(), tmp_path))


def test_it_is_loaded_for_a_cuda_tensor(copied):
    library = conftest.cuda_library()
    if not library:
        pytest.skip("needs the kernels for CUDA")
    shutil.copy(library, copied.parent)
    assert run(copied) == ("True True", [])


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "broken"])
def test_without_it_the_ops_are_composed_and_a_warning_says_why(copied, broken):
    if broken:
        (copied.parent / CUDA_LIBRARY).write_bytes(b"no library")
    found, said = run(copied)
    assert found == "False True" and len(said) == 1
    assert "tsmem: its kernels for CUDA are not there, so that norms and activations are made of PyTorch's operators, which takes longer: " in said[0]
    assert CUDA_LIBRARY in said[0] and ("was not built" in said[0]) != broken
