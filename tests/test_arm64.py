"""The CPU's kernels compile for arm64, where its cross compiler is installed (Debian's g++-aarch64-linux-gnu)."""
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="there is no aarch64-linux-gnu-g++")
def test_kernels_compile(tmp_path):
    env = {**os.environ, "TSMEM_TORCH": str(pathlib.Path(torch.__file__).parent)}
    for command in (["cmake", "--preset", "aarch64", "-B", tmp_path], ["cmake", "--build", tmp_path, "--target", "tsmem_kernels_baseline"]):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    objects = list((tmp_path / "ops").rglob("*.o"))
    assert objects and all(p.read_bytes()[:20][18:] == b"\xb7\x00" for p in objects)  # ELF's number for AArch64
