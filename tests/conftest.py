"""Loads the op library once: TSMEM_OPS, or build/lib/libtsmem_ops.so, unless `import torch` has loaded it already."""

import os
import pathlib
import shutil

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


def library() -> pathlib.Path:
    """The library that the tests are about."""
    return pathlib.Path(os.environ.get("TSMEM_OPS", ROOT / "build/lib/libtsmem_ops.so")).resolve()


def emulated_library() -> pathlib.Path:
    """The CUDA kernels on an emulated device (tests/cuda)."""
    return library().with_name("libtsmem_cuda_emulated.so")


def cuda_library():
    """libtsmem_ops_cuda.so; None where there is nothing to build it with (no nvcc, or a torch without CUDA), or TSMEM_CUDA=OFF."""
    path = library().with_name("libtsmem_ops_cuda.so")
    nvcc = shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    assert path.exists() or not nvcc or torch.version.cuda is None or os.environ.get("TSMEM_CUDA") == "OFF", f"{path} is not built, and nvcc is there"
    return path if path.exists() else None


def load():
    """torch.ops.tsmem, with the library loaded."""
    if not any(s.name.startswith("tsmem::") for s in torch._C._jit_get_all_schemas()):
        torch.ops.load_library(str(library()))
    if os.environ.get("TSMEM_EMULATED_CUDA"):  # the CUDA kernels, emulated, in place of the CPU's
        torch.ops.load_library(str(emulated_library()))
    return torch.ops.tsmem


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same numbers, alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ops():
    torch.set_num_threads(2)
    return load()


@pytest.fixture
def one_thread(ops):
    """One thread a kernel: sums in the same order at every call."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
