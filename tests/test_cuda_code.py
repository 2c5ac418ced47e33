"""The machine code of the CUDA kernels, as bench/cuda_code.py reads it: no device is needed."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import conftest
import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "bench" / "cuda_code.py"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    library = conftest.cuda_library()
    if not library:
        pytest.skip("no nvcc, or no torch with CUDA, to build the CUDA library with")
    out = tmp_path_factory.mktemp("code") / "kernels.json"
    done = subprocess.run([sys.executable, str(SCRIPT), str(library), "--json", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {k["kernel"]: k for k in json.loads(out.read_text())}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "float"])
@pytest.mark.parametrize("act", ["Relu", "Identity"])
def test_norms_have_enough_in_flight(kernels, dtype, act):
    """27 KB a multiprocessor hide .75 us at 4.8 TB/s; passes that write a map have no spills."""
    maps = [f"map_rows<{dtype}, {act}, {b}>" for b in ("false", "true")] + [f"map_flat<{dtype}, {act}, true, {b}>" for b in ("false", "true")]
    stats = [f"stats_rows<{dtype}, true>", f"stats_planar<{dtype}, true>"]
    sums = [f"reduce_{way}<{dtype}, NormSums<{act}>, true, NormArgs>" for way in ("rows", "planar")]
    for name in maps + stats + sums:
        found = [k for n, k in kernels.items() if n.startswith(name)]
        assert len(found) == 1, (name, sorted(kernels))
        assert found[0]["in_flight"] >= 27 << 10, found[0]
        assert name in sums or found[0]["spills"] == 0, found[0]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "float"])
@pytest.mark.parametrize("act", ["Relu", "Identity", "Silu"])
def test_kernels_that_keep_a_map_have_no_spills(kernels, dtype, act):
    for name in (f"persistent_forward<{dtype}, {act}>", f"persistent_backward<{dtype}, {act}>"):
        found = [k for n, k in kernels.items() if n.startswith(name)]
        assert len(found) == 1, (name, sorted(kernels))
        assert found[0]["blocks"] >= 2 and found[0]["spills"] == 0 and found[0]["in_flight"] >= 27 << 10, found[0]


@pytest.mark.parametrize("kernel", ["bf16, 8", "f16, 8", "float, 4", "double, 2"])
def test_dropouts_have_enough_in_flight(kernels, kernel):
    found = [k for n, k in kernels.items() if n.startswith(f"dropout_groups<{kernel}>")]
    assert len(found) == 1, sorted(kernels)
    assert found[0]["in_flight"] >= 27 << 10 and found[0]["spills"] == 0, found[0]


def test_reads_before_the_first_use():
    """The count itself, on code written by hand."""
    spec = importlib.util.spec_from_file_location("cuda_code", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    load = "        /*0010*/  @P0 LDG.E.128 R{}, desc[UR6][R2.64] ;"
    use = "        /*0020*/  FADD R40, R{}, R41 ;"
    assert module.most_in_flight([load.format(4), load.format(8), use.format(10), load.format(12), use.format(13)]) == 2
    assert module.most_in_flight([load.format(4), use.format(5), load.format(8), use.format(9)]) == 1
    assert module.most_in_flight([use.format(9)]) == 0


def test_refusals(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "none.so")], capture_output=True, text=True)
    assert done.returncode == 1 and "There is no" in done.stderr and "Traceback" not in done.stderr
