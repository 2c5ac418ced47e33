"""The op library compiles for arm64, and the CPU's baseline kernels, emulated, compute there what they do here.

Needs Debian's g++-aarch64-linux-gnu and qemu-user."""
import math
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
EPSILON = {"f32": 2.0**-23, "f64": 2.0**-52, "bf16": 2.0**-7, "f16": 2.0**-10}


def lines(*command):
    """What a run of kernel_values prints: (name, dtype) -> values."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return {(name, dtype): [float(v) for v in values] for name, dtype, *values in rows}


def build(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a build for arm64, by this machine's torch: its headers are the same. What is only compiled is not optimised; the kernels ask for it themselves."""
    if not shutil.which("aarch64-linux-gnu-g++"):
        pytest.skip("there is no aarch64-linux-gnu-g++")
    folder = tmp_path_factory.mktemp("arm64")
    build("cmake", "--preset", "aarch64", "-B", folder, f"-DTSMEM_TORCH={pathlib.Path(torch.__file__).parent}", "-DCMAKE_CXX_FLAGS_RELEASE=-O0")
    return folder


def test_what_knows_the_processor_compiles(folder):
    """The rest of the op library is compiled by hand, in five minutes; linking takes arm64's torch."""
    targets = build("ninja", "-C", folder, "-t", "targets", "all").splitlines()
    assert "tsmem_ops_cpu: phony" in targets
    build("ninja", "-C", folder, "tsmem_ops_cpu")


@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="there is no qemu-aarch64")
def test_kernels_compute_the_same(folder):
    build("cmake", "--build", folder, "--target", "tsmem_kernel_values")
    binary = pathlib.Path(os.environ.get("TSMEM_BIN", ROOT / "build/bin/tsmem")).with_name("tsmem_kernel_values")
    here, there = lines(binary), lines("qemu-aarch64", folder / "bin/tsmem_kernel_values")
    assert here.keys() == there.keys() and {dtype for _, dtype in here} == EPSILON.keys()
    for (name, dtype), values in here.items():
        assert values and len(values) == len(there[name, dtype]), name
        # The processors' libraries have their own exp and erf: a unit or two of the largest value.
        size = max((abs(v) for v in values if math.isfinite(v)), default=0)
        for a, b in zip(values, there[name, dtype]):
            assert a == b or (a != a and b != b) or abs(a - b) <= 4 * EPSILON[dtype] * size, (name, dtype, a, b)
