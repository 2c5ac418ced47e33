"""Tests of the kernels whose code differs by instruction set, again with those of older machines."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets(isa):
    files = [str(HERE / f"test_{name}.py") for name in ("norm", "instance_norm", "pool", "act", "rnn")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env={**os.environ, "TSMEM_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
