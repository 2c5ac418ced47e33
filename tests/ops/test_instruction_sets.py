"""Tests of the kernels whose code differs by instruction set, again with those of older machines."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def test_lesser_instruction_sets():
    """Side by side: they are the longest of all tests, and the last to end."""
    files = [str(HERE / f"test_{name}.py") for name in ("norm", "group_norm", "instance_norm", "pool", "act", "rnn")]
    # Not what runs every set itself, what is the same kernels with more draws, in float64 alone, beside a convolution, once more in backward, or on the same large maps in the other dtype.
    twice = "not (test_instruction_sets_agree or test_float32_is_no_further or gradcheck or test_conv_batch_norm_act or test_recomputed_as_exact or test_large_maps and f32)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", twice, *files]
    runs = {isa: subprocess.Popen(command, env={**os.environ, "TSMEM_ISA": isa}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for isa in ("baseline", "avx2")}
    said = {isa: run.communicate()[0] for isa, run in runs.items()}
    for isa, run in runs.items():
        assert run.returncode == 0, f"{isa}: {said[isa][-4000:]}"
