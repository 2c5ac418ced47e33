"""Forward and backward from several threads, compared with what one thread gives: the program of tests/threads. `make tsan` runs it under ThreadSanitizer."""

import os
import subprocess
import sys

import conftest


def test_threads(tmp_path):
    program = conftest.library().parent.parent / "bin/tsmem_threads"
    assert program.exists(), f"{program} is not built: build with TSMEM_TESTS=ON"
    environment = {**os.environ, "PYTHONPATH": str(conftest.ROOT / "python")}
    subprocess.run([sys.executable, conftest.ROOT / "tests/threads/write_models.py", tmp_path], env=environment, check=True)
    done = subprocess.run([program, tmp_path, "3"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
