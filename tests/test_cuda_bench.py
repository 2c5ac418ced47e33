"""bench/cuda.sh without a device, on emulated kernels and small sizes: every path of the scripts that are run where there is one."""

import json
import os
import pathlib
import subprocess
import sys

import conftest
import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLES = {"each": 20, "models": 10, "batches": 3, "kernels": 9}
# What compute-sanitizer is called with, run as it is.
SANITIZER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
echo sanitized
exec "$@"
"""


@pytest.fixture(scope="module")
def bench(ops, tmp_path_factory):
    """bench/cuda.sh in a folder of its own."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "bin").mkdir()
    tool = folder / "bin" / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    env = {**os.environ, "TSMEM_TEST_DEVICE": "cpu", "TSMEM_EMULATED_CUDA": "1", "OUT": str(folder / "out"), "TSMEM_CUDA_MODELS": str(folder / "models"),
           "TSMEM_OPS": str(conftest.library()), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TSMEM_CUDA_CASES": str(folder / "none"),
           "PYTEST_ADDOPTS": "-p no:cacheprovider -k test_masks", "PYTHON": sys.executable}  # fmt: skip

    def run(*arguments):
        return subprocess.run(["bash", str(ROOT / "bench" / "cuda.sh"), *arguments], capture_output=True, text=True, env=env, timeout=900)

    run.out = folder / "out"
    done = run("prepare")
    assert done.returncode == 0, done.stderr
    done = run("run", "600")
    assert done.returncode == 0, (done.stdout, done.stderr)
    return run


def rows(bench, table):
    return json.loads((bench.out / f"cuda-{table}.json").read_text())["rows"]


def test_all_of_it_runs(bench):
    for table, count in TABLES.items():
        found = rows(bench, table)
        assert len(found) == count and not any("error" in row for row in found), found
    assert [line.split() for line in (bench.out / "done").read_text().splitlines()] == [[name, "0"] for name in ("test", "sanitize", *TABLES)]


def test_goes_on_where_it_stopped(bench):
    """What was saved is not measured again."""
    path = bench.out / "cuda-models.json"
    table = json.loads(path.read_text())
    left = [{**row, "ms": -1} for row in table["rows"] if row["what"] != "offload"]
    path.write_text(json.dumps({**table, "rows": left}))
    (bench.out / "done").write_text("test 0\nsanitize 0\nbatches 0\neach 0\nkernels 0\n")
    done = bench("run")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert rows(bench, "models")[:-1] == left and rows(bench, "models")[-1]["what"] == "offload"
    assert "All is done" in done.stdout and "== kernels" not in done.stdout
    done = bench("models", "--again", "--seconds", "0")
    assert done.returncode == 3 and "the next run goes on here" in done.stdout
    path.write_text(json.dumps(table))


def test_what_went_wrong_is_said(bench):
    before = (bench.out / "done").read_text()
    (bench.out / "done").write_text(before.replace("each 0", "each 1"))
    done = bench("run")
    assert done.returncode == 1 and "each ended with exit code 1." in done.stderr
    path = bench.out / "cuda-batches.json"
    table = path.read_text()
    path.write_text(table[:20])
    done = bench("batches")
    assert done.returncode == 1 and "is no table of an earlier run" in done.stderr and "Traceback" not in done.stderr
    path.write_text(table)
    (bench.out / "done").write_text(before)
    assert bench("nothing").returncode == 2


def test_every_kernel_without_torch(ops):
    """What compute-sanitizer runs where there is a device: here it ends in a sentence."""
    if not conftest.cuda_library():
        pytest.skip("no nvcc, or no torch with CUDA, to build the CUDA library with")
    build = conftest.library().parents[1]
    if not (build / "CMakeCache.txt").is_file():
        pytest.skip("the libraries lie outside of the folder that they were built in")
    done = subprocess.run(["cmake", "--build", str(build), "--target", "tsmem_cuda_cases"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([str(build / "bin" / "tsmem_cuda_cases")], capture_output=True, text=True)
    if torch.cuda.is_available():
        assert done.returncode == 0 and "Every kernel ran." in done.stdout, done.stderr
    else:
        assert done.returncode == 1 and "was refused" in done.stderr and len(done.stderr.splitlines()) == 1, (done.returncode, done.stderr)
