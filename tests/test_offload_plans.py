"""Plans that offload outputs, over a link that the CPU simulates: what is promised is what a step needs, and the file trains as the original, with and without a link."""
import gc
import json

import allocator
import pytest
import small
import torch
import tsmem
from command_line import fails, run

SHAPE = "2x3x48x48"
LINK = ["--offload", "--link", "100GB"]
pytestmark = pytest.mark.usefixtures("one_thread")  # as the tool runs here


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Twelve layers of one size: a chain that is long beside what is under way."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("offload") / "old.pt"
    torch.jit.script(torch.nn.Sequential(*[small.conv_bn_relu(16 if i else 3, 16) for i in range(12)])).save(str(path))
    return path


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """The model, its file for a budget of 40 %, and what was said of it."""
    folder = tmp_path_factory.mktemp("written")
    old, new, report = model, folder / "new.pt", folder / "report.json"
    done = run("rewrite", old, "-o", new, "--input", SHAPE, "--budget", "40%", *LINK, "--json", report)
    assert done.returncode == 0, done.stderr
    assert "wait in the host's memory" in done.stdout
    return old, new, json.loads(report.read_text())["predicted"]


def peak_of_step(module):
    """Bytes, with gradients and the output's gradient there before."""
    x = torch.randn(2, 3, 48, 48)
    gradient = torch.randn_like(module(x))
    allocator.prepare(module)
    for _ in range(3):
        module(x).backward(gradient)
    gc.collect()
    return allocator.most_held(lambda: module(x).backward(gradient))


def test_what_is_said(written):
    _, _, plan = written
    assert plan["offloaded_bytes"] > 0 and plan["offloaded"]
    assert all(op["module"] and op["op"] for op in plan["offloaded"])
    assert plan["peak_bytes"] <= plan["budget"]


def test_the_peak_is_what_was_promised(written):
    """Measured from outside, with the link and, as everything is kept then, without."""
    old, new, plan = written
    module = torch.jit.load(str(new))
    torch.ops.tsmem._simulate_link(100e9)
    try:
        peak = peak_of_step(module)
        assert any(e.startswith("fetch") for e in torch.ops.tsmem._link_events())
    finally:
        torch.ops.tsmem._simulate_link(0)
    assert peak == pytest.approx(plan["peak_bytes"], rel=0.02)
    assert peak_of_step(module) > 1.2 * peak


def test_the_numbers_are_the_originals(written):
    old, new, _ = written
    a, b = torch.jit.load(str(old)).double().train(), torch.jit.load(str(new)).double().train()
    torch.ops.tsmem._simulate_link(100e9)
    try:
        for _ in range(4):
            x = torch.randn(2, 3, 48, 48, dtype=torch.float64)
            out = [m(x) for m in (a, b)]
            torch.testing.assert_close(out[1], out[0], rtol=1e-9, atol=1e-9)
            for m, o in zip((a, b), out):
                m.zero_grad()
                o.square().mean().backward()
            for p, q in zip(a.parameters(), b.parameters()):
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9)
            for p, q in zip(a.buffers(), b.buffers()):
                torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-9)
    finally:
        torch.ops.tsmem._simulate_link(0)


def test_less_than_by_recomputing_alone(model):
    """Where the link is fast: no larger budget than without, and less time for the next one."""
    points = {}
    for name, options in {"alone": [], "offload": LINK}.items():
        done = run("plan", model, "--input", SHAPE, "--points", "4", "--estimate", "--json", "-", *options)
        assert done.returncode == 0, done.stderr
        points[name] = json.loads(done.stdout)["points"]
    assert points["offload"][0]["predicted_peak_bytes"] <= points["alone"][0]["predicted_peak_bytes"]
    assert points["offload"][1]["predicted_seconds"] < points["alone"][1]["predicted_seconds"]
    assert points["offload"][1]["offloaded_bytes"] > 0 == points["alone"][1]["offloaded_bytes"]


def test_in_the_process(model):
    module = torch.jit.load(str(model))
    report = tsmem.plan(module, input=SHAPE, points=4, estimate=True, offload=True, link="100GB")
    assert any(p["offloaded_bytes"] > 0 for p in report["points"])
    tsmem.rewrite(module, input=SHAPE, budget="40%", offload=True, link=100e9)
    assert torch.ops.tsmem._link_events() == []  # no link is left behind
    with pytest.raises(tsmem.Error, match="link='25GB'"):
        tsmem.plan(module, input=SHAPE, offload=True)
    with pytest.raises(tsmem.Error, match="offload=True"):
        tsmem.plan(module, input=SHAPE, link="25GB")


def test_wrong_use(model, tmp_path):
    fails(2, "plan", model, "--input", SHAPE, "--offload", says="--link 25GB")
    fails(2, "plan", model, "--input", SHAPE, "--estimate", "--offload", says="--link 25GB")
    fails(2, "plan", model, "--input", SHAPE, "--link", "25GB", says="--offload")
    fails(2, "plan", model, "--input", SHAPE, "--offload", "--link", "fast", says="--link 'fast' is not a size")
    fails(2, "rewrite", model, "-o", tmp_path / "new.pt", "--offload", says="give --budget too")
    fails(2, "rewrite", model, "-o", tmp_path / "new.pt", "--offload", "--restore", says="exclude each other")
    assert not (tmp_path / "new.pt").exists()
