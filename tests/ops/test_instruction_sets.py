"""Tests of the kernels whose code differs by instruction set, again with those of older machines."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def test_lesser_instruction_sets():
    """Side by side: they are the longest of all tests, and the last to end."""
    files = [str(HERE / f"test_{name}.py") for name in ("norm", "instance_norm", "pool", "act", "rnn")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    runs = {isa: subprocess.Popen(command, env={**os.environ, "TSMEM_ISA": isa}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for isa in ("baseline", "avx2")}
    said = {isa: run.communicate()[0] for isa, run in runs.items()}
    for isa, run in runs.items():
        assert run.returncode == 0, f"{isa}: {said[isa][-4000:]}"
