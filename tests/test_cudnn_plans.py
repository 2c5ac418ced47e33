"""cuDNN's plans for the fused convolutions of whole networks, built for an H200 and an A100 that are described: there is no device here."""

import os
import pathlib
import subprocess

import conftest
import pytest
import torch
import torchvision

FOLDER = pathlib.Path(__file__).parent / "cuda" / "devices"
# The compute capability, and the engine that takes these graphs there.
DEVICES = {"h200": (90, "eng2"), "a100": (80, "eng0")}
NETWORKS = ["resnet50", "densenet121", "mobilenet_v2"]


@pytest.fixture(scope="module")
def build():
    """build(device, dtype, shapes): what is said of the convolution and of its weight's gradient, a pair a shape."""
    if os.environ.get("TSMEM_CUDA") == "OFF":
        pytest.skip("TSMEM_CUDA is OFF")
    program = conftest.library().parents[1] / "bin" / "tsmem_build_plans"
    cudnn = pathlib.Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    if not cudnn.exists():
        pytest.skip("this torch brings no cuDNN")
    assert program.exists(), f"{program} is not built: cmake says which headers are missing"

    def run(device, dtype, shapes):
        lines = "".join(f"{dtype} {' '.join(map(str, s))}\n" for s in shapes)
        done = subprocess.run([program, cudnn, FOLDER / f"{device}.json", str(DEVICES[device][0])], input=lines, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said = [line.split() for line in done.stdout.splitlines()]
        assert len(said) == 2 * len(shapes)
        return list(zip(said[::2], said[1::2]))

    return run


def shapes_of(network):
    """N C H W K R S stride padding dilation of each convolution of an image network, those that cuDNN's engines may take: one group, channels in eights."""
    with torch.device("meta"):
        model = getattr(torchvision.models, network)()
    found = {}

    def note(conv, inputs, _):
        (size,) = {(conv.stride[i], conv.padding[i], conv.dilation[i]) for i in (0, 1)}
        if conv.groups == 1 and conv.in_channels % 8 == 0 and conv.out_channels % 8 == 0:
            found[(*inputs[0].shape, conv.out_channels, *conv.kernel_size, *size)] = None

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    model(torch.empty(64, 3, 224, 224, device="meta"))
    return list(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
def test_every_shape_has_a_plan(build, network, device):
    shapes = shapes_of(network)
    assert len(shapes) > 15
    for shape, pair in zip(shapes, build(device, "f16", shapes)):
        for kind, engine, workspace in pair:
            assert (kind, engine.split("_")[0]) == ("plan", DEVICES[device][1]), (shape, pair)
            # The largest needs 9 MiB: little beside the activation that is not written.
            assert 0 <= int(workspace) <= 16 << 20, (shape, pair)


def test_what_has_none_says_so(build):
    shape = (64, 64, 56, 56, 64, 3, 3, 1, 1, 1)
    odd = (64, 3, 224, 224, 64, 7, 7, 2, 3, 1)
    for device in DEVICES:
        for dtype, s in (("bf16", shape), ("f16", odd)):
            for said in build(device, dtype, [s])[0]:
                assert said[0] == "none" and len(said) > 3, (device, dtype, said)
