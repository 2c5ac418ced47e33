"""Devices that have no kernels of ours (XPU, ROCm, those of others): raw ops are composed of PyTorch's there, and the same is kept. On a device whose memory is the
host's (tests/device)."""

import json
import pathlib
import subprocess
import sys

import conftest
import pytest

DEVICE = pathlib.Path(__file__).resolve().parents[1] / "device"
# Of PyTorch's own bytes on that device.
SAVED = {"residual": 0.6, "swish": 0.5, "group norms": 0.6, "encoder": 0.65}


@pytest.fixture(scope="module")
def cases():
    library = pathlib.Path(conftest.library()).parent / "libtsmem_host_device.so"
    done = subprocess.run([sys.executable, DEVICE / "compare.py", library], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_operators_give_the_numbers_of_the_cpu(cases):
    operators = [c for c in cases if "operator" in c]
    assert len(operators) > 150
    assert [c for c in operators if not (c["error"] <= 1e-9 and c["strides"] and c["off"] <= 1)] == []


def test_borders(cases):
    borders = [c for c in cases if "border" in c]
    assert len(borders) == 9 and [c for c in borders if not c["equal"]] == []


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("door", ["torch.compile", "file"])
def test_models_keep_less(cases, name, door):
    (case,) = [c for c in cases if c.get("model") == name and c["door"] == door]
    assert case["error"] <= 1e-9
    assert case["saved"] <= SAVED[name] and case["peak"] <= 1


def test_autocast_of_another_device_is_refused(cases):
    says = {c["autocast"]: c["says"] for c in cases if "autocast" in c}
    assert says["operator"].startswith("tsmem::conv2d: tsmem knows autocast of the CPU and of CUDA alone, and not of this device.")
    assert "autocast is on for host, and tsmem knows that of the CPU and of CUDA alone, so it runs as it is" in says["compiled"]
