"""`tsmem plan`, and `tsmem rewrite --budget`: what is promised is what a step needs, and what is written trains as the original."""
import functools
import json
import re
import zipfile
from xml.etree import ElementTree

import allocator
import models
import pytest
import small
import torch
import tsmem  # noqa: F401  loads the operators

from command_line import fails, run

IMAGE = "2x3x64x64"
INPUT = ["--input", IMAGE]
PLAN = {"budget", "predicted_peak_bytes", "predicted_seconds", "kept_bytes", "recomputed_flops"}
PREDICTED = {"budget", "peak_bytes", "seconds", "kept_bytes", "recomputed_flops"}
pytestmark = pytest.mark.usefixtures("one_thread")  # as the tool runs here: some kernels have a buffer for every thread


class Branches(torch.nn.Module):
    """A loop whose length depends on an attribute, and a branch that depends on numbers."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = small.conv_bn_relu(3, 8), small.conv_bn_relu(8, 8)
        self.rounds = 3

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.rounds):
            if bool(x.mean() > -1e9):
                x = x + self.block(x)
            else:
                x = self.block(x).sin()
        return x


class Unknown(torch.nn.Module):
    """Nothing that any pattern knows."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3, 64, 64))

    def forward(self, x):
        return torch.fft.fft2(x * self.w).real.cumsum(-1)


def eager(name):
    torch.manual_seed(0)
    if name == "resnet18":
        return models.build("tv:resnet18")
    return {
        "unet": lambda: small.UNet((8, 16, 32)), "residual": small.Residual, "branches": Branches, "unknown": Unknown,
        "linear": lambda: torch.nn.Linear(64, 32), "attention": small.Attention,
    }[name]().train()  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """files.model(name), and files.planned(name, budget) -> the rewritten file and its report; each made once."""
    directory = tmp_path_factory.mktemp("plan")

    class Files:
        @staticmethod
        @functools.cache
        def model(name):
            path = directory / f"{name}.pt"
            kind = name.removesuffix(" traced")
            module = torch.jit.script(eager(kind)) if kind == name else torch.jit.trace(eager(kind), torch.randn(2, 3, 64, 64), check_trace=False)
            module.save(str(path))
            return path

        @staticmethod
        @functools.cache
        def planned(name, budget, spec=IMAGE, *options):
            out, report = directory / f"{name}.{budget}{''.join(options)}.mem.pt".replace("/", "_"), directory / "report.json"
            done = run("rewrite", Files.model(name), "-o", out, "--input", spec, "--budget", budget, "--json", report, *options)
            assert done.returncode == 0, done.stderr
            return out, json.loads(report.read_text())

        @staticmethod
        @functools.cache
        def front(name, *options):
            report = directory / "front.json"
            done = run("plan", Files.model(name), *INPUT, "--json", report, *options)
            assert done.returncode == 0, done.stderr
            assert "smallest budget" in done.stdout and "of original" in done.stdout
            return json.loads(report.read_text())

    return Files


def numbers(spec):
    return [int(n) for n in spec.split("x")]


def peak(path, spec=IMAGE):
    """Of a step, as the profiler sees it. The gradient that backward starts from is there before: what a loss needs is no part of it."""
    module, x = torch.jit.load(str(path)).train(), torch.randn(numbers(spec))
    allocator.prepare(module)
    gradient = torch.randn_like(module(x))
    for _ in range(2):
        module(x).backward(gradient)
    return allocator.most_held(lambda: module(x).backward(gradient))


def double(path):
    return torch.jit.load(str(path)).double().train()


def step(module, x):
    """The loss and all gradients of one step in float64."""
    module.zero_grad()
    loss = sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in allocator.floating(module(x)))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        assert float((a - e).abs().max()) <= 1e-9 * max(1, float(e.abs().max()))


# plan


def check_front(front):
    points = front["points"]
    assert set(front) >= {"points", "smallest_budget", "solver", "solve_seconds"}
    assert front["solver"] and front["solve_seconds"] >= 0
    assert all(set(p) >= PLAN for p in points)
    for p in points:
        assert 0 < p["predicted_peak_bytes"] <= p["budget"] and p["predicted_seconds"] > 0
        assert p["kept_bytes"] <= p["predicted_peak_bytes"] and p["recomputed_flops"] >= 0
    assert front["smallest_budget"] == min(p["predicted_peak_bytes"] for p in points) <= points[0]["budget"]
    for a, b in zip(points, points[1:]):
        assert a["budget"] <= b["budget"] and a["predicted_seconds"] >= b["predicted_seconds"]


@pytest.mark.parametrize("name", ("unet", "residual"))
def test_front(files, name):
    front = files.front(name)
    check_front(front)
    assert len(front["points"]) == 10
    first, last = front["points"][0], front["points"][-1]
    assert first["budget"] < 0.75 * last["budget"] and first["recomputed_flops"] > last["recomputed_flops"]


def test_points(files, tmp_path):
    front = files.front("unet", "--points", "3")
    check_front(front)
    assert len(front["points"]) == 3
    done = run("plan", files.model("unet"), *INPUT, "--points", "2", "--json", "-")
    assert done.returncode == 0 and len(json.loads(done.stdout)["points"]) == 2


@pytest.mark.parametrize("name", ("linear", "unknown", "branches"))
def test_nothing_or_little_to_choose(files, name, tmp_path):
    spec = "16x64" if name == "linear" else IMAGE
    done = run("plan", files.model(name), "--input", spec, "--json", "-", "--points", "3")
    assert done.returncode == 0, done.stderr
    front = json.loads(done.stdout)
    check_front(front)
    out = tmp_path / "out.pt"
    done = run("rewrite", files.model(name), "-o", out, "--input", spec, "--budget", front["smallest_budget"] * 101 // 100)
    assert done.returncode == 0, done.stderr
    x = torch.randn(numbers(spec), dtype=torch.float64)
    assert_close(step(double(out), x), step(double(files.model(name)), x))
    assert peak(out, spec) <= front["smallest_budget"] * 1.02


def test_plot(files, tmp_path):
    svg, png = tmp_path / "front.svg", tmp_path / "front.png"
    done = run("plan", files.model("residual"), *INPUT, "--points", "4", "--plot", svg)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    root = ElementTree.fromstring(svg.read_text())
    dots = [c for c in root.iter("{http://www.w3.org/2000/svg}circle") if len(c)]
    assert root.tag.endswith("svg") and len(dots) == 4 and all("budget" in c[0].text for c in dots)
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in dots]
    width, height = float(root.get("width", 740)), float(root.get("height", 450))
    assert all(0 < x < width and 0 < y < height for x, y in places) and places == sorted(places)
    done = run("plan", files.model("residual"), *INPUT, "--points", "2", "--plot", png)
    assert done.returncode == 0, done.stderr
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["front.png", "front.svg"]


# rewrite --budget


CASES = [("unet", "60%"), ("unet", "smallest"), ("unet traced", "60%"), ("residual", "70%"), ("residual", "smallest")]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request, files):
    """(name, rewritten file, report)"""
    name, budget = request.param
    if budget == "smallest":
        budget = files.front(name)["smallest_budget"] * 101 // 100
    return name, *files.planned(name, budget)


def test_report(case):
    p = case[2]["predicted"]
    assert set(p) >= PREDICTED and p["peak_bytes"] <= p["budget"] < p["original_peak_bytes"]
    assert p["kept_bytes"] <= p["peak_bytes"] and p["seconds"] > 0 and case[2]["matches"]
    for again in p["run_again"]:
        assert set(again) == {"module", "op"}


def test_peak_is_as_predicted(case, files):
    name, out, report = case
    p, measured = report["predicted"], peak(out)
    assert measured <= p["budget"]
    assert abs(measured - p["peak_bytes"]) <= 0.02 * p["peak_bytes"]
    assert abs(peak(files.model(name)) - p["original_peak_bytes"]) <= 0.02 * p["original_peak_bytes"]


def test_trains_as_the_original(case, files):
    name, out, _ = case
    original, rewritten = double(files.model(name)), double(out)
    torch.manual_seed(1)
    x = [torch.randn(numbers(IMAGE), dtype=torch.float64) for _ in range(4)]
    optimizers = [torch.optim.SGD(m.parameters(), 1e-5) for m in (original, rewritten)]
    for batch in x:
        assert_close(step(rewritten, batch), step(original, batch))
        for o in optimizers:
            o.step()
    state = original.state_dict()
    assert list(state) == list(rewritten.state_dict())
    for key, value in rewritten.state_dict().items():
        assert_close([value.double()], [state[key].double()])


def test_state_eval_and_frozen_layers(case, files):
    name, out, _ = case
    original, rewritten = torch.jit.load(str(files.model(name))), torch.jit.load(str(out))
    state = rewritten.state_dict()
    assert list(original.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in original.state_dict().items())
    original, rewritten, x = original.double(), rewritten.double(), torch.randn(numbers(IMAGE), dtype=torch.float64)
    for m in (original, rewritten):
        m.eval()
    with torch.no_grad():
        assert_close([rewritten(x)], [original(x)])
    assert_close(step(rewritten, x), step(original, x))
    for m in (original, rewritten):
        m.train()
        for i, p in enumerate(m.parameters()):
            p.requires_grad_(i % 3 > 0)
    for _ in range(2):
        assert_close(step(rewritten, x), step(original, x))


def test_verify_restore_and_again(files, tmp_path):
    model = files.model("unet")
    out, report = files.planned("unet", "60%")
    done = run("verify", model, out, *INPUT, "--json", "-", "--calls", "2")
    verified = json.loads(done.stdout)
    assert done.returncode == 0 and verified["equal"], done.stderr
    p = report["predicted"]
    assert abs(verified["peak_bytes"][1] - p["peak_bytes"]) <= 0.02 * p["peak_bytes"]

    back = tmp_path / "back.pt"
    assert run("rewrite", out, "-o", back, "--restore").returncode == 0
    assert run("diff", model, back).returncode == 0
    written = zipfile.ZipFile(out), zipfile.ZipFile(back)
    found = [any(b"_tsmem_" in z.read(n) for n in z.namelist() if n.endswith((".py", ".pkl"))) for z in written]
    assert found == [True, False]
    assert "plan" in json.loads(torch._C.PyTorchFileReader(str(out)).get_record("extra/tsmem.json"))

    # A plan starts from the original, whatever was planned before.
    again = tmp_path / "again.pt"
    done = run("rewrite", out, "-o", again, *INPUT, "--budget", "80%", "--json", tmp_path / "again.json")
    assert done.returncode == 0, done.stderr
    second = json.loads((tmp_path / "again.json").read_text())
    assert second["predicted"]["original_peak_bytes"] == p["original_peak_bytes"] and second["matches"] == report["matches"]
    assert p["peak_bytes"] < peak(again) <= second["predicted"]["budget"]
    done = run("plan", out, *INPUT, "--points", "2", "--json", "-")
    assert json.loads(done.stdout)["original"]["peak_bytes"] == p["original_peak_bytes"]
    assert run("rewrite", out, "-o", tmp_path / "regions.pt").returncode == 0
    assert run("rewrite", tmp_path / "regions.pt", "-o", back, "--restore", "--force").returncode == 0
    assert run("diff", model, back).returncode == 0


def test_smaller_budgets_run_more_again(files):
    ran = [len(files.planned("unet", b)[1]["predicted"]["run_again"]) for b in ("100%", "60%")]
    ran.append(len(files.planned("unet", files.front("unet")["smallest_budget"] * 101 // 100)[1]["predicted"]["run_again"]))
    assert ran[0] == 0 < ran[1] <= ran[2]


def test_sizes_are_bytes(files):
    whole = files.planned("unet", "60%")[1]["predicted"]
    assert whole["budget"] == int(0.6 * whole["original_peak_bytes"])
    done = run("rewrite", files.model("residual"), "--dry-run", *INPUT, "--budget", "3000 KiB", "--json", "-")
    assert json.loads(done.stdout)["predicted"]["budget"] == 3000 << 10


def test_resnet(files):
    """torchvision's own, which has what small models lack: a large share of weights, strides, a pool after the stem."""
    spec = "2x3x96x96"
    out, report = files.planned("resnet18", "80%", spec)
    p, measured = report["predicted"], peak(out, spec)
    assert measured <= p["budget"] and abs(measured - p["peak_bytes"]) <= 0.02 * p["peak_bytes"]
    x = torch.randn(numbers(spec), dtype=torch.float64)
    assert_close(step(double(out), x), step(double(files.model("resnet18")), x))


def test_attention_is_recomputed(files, tmp_path):
    """Fused, or spelled out."""
    spec = "8x3x64x64"
    enough = ["--solve-seconds", "60"]  # beside other work too
    # Of choices with one predicted peak the times decide, which other work on the machine changes, and some need more than is predicted: so a few times.
    for _ in range(4):
        says = [fails(4, "rewrite", files.model("attention"), "--dry-run", "--input", spec, "--budget", budget, *enough, says="smallest possible budget") for budget in ("10%", "40%")]
        smallest = {int(re.search(r"(\d+) bytes\)", what)[1]) for what in says}
        if len(smallest) == 1:
            break
    assert len(smallest) == 1, "the smallest budget depends on the one that was asked for"
    out, report = tmp_path / "out.pt", tmp_path / "report.json"
    for _ in range(4):
        done = run("rewrite", files.model("attention"), "-o", out, "--input", spec, "--budget", *smallest, "--json", report, *enough)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    p = json.loads(report.read_text())["predicted"]
    assert {"tsmem::linear", "tsmem::matmul"} <= {site["op"] for site in p["run_again"]}
    assert peak(out, spec) <= p["budget"]
    x = torch.randn(numbers(spec), dtype=torch.float64)
    assert_close(step(double(out), x), step(double(files.model("attention")), x))


def test_a_plan_without_the_time_to_solve(files):
    """As in networks of many thousands of layers: a choice that fits all the same, and an honest gap."""
    out, report = files.planned("unet", "60%", IMAGE, "--solve-seconds", "1e-6")
    p = report["predicted"]
    assert p["gap"] > 0.003 and p["run_again"]
    assert p["peak_bytes"] <= p["budget"] and abs(peak(out) / p["peak_bytes"] - 1) < 0.001
    _, solved = files.planned("unet", "60%")
    assert solved["predicted"]["gap"] < p["gap"]


def test_a_budget_that_cannot_be_met(files, tmp_path):
    out = tmp_path / "out.pt"
    says = fails(4, "rewrite", files.model("unet"), "-o", out, *INPUT, "--budget", "1KiB", says="smallest possible budget")
    assert "whose peak is at most 1.0 KiB (" in says
    assert list(tmp_path.iterdir()) == []
    smallest = int(re.search(r"(\d+) bytes\)", says)[1])
    assert abs(smallest - files.front("unet")["smallest_budget"]) <= 0.01 * smallest
    done = run("rewrite", files.model("unet"), "-o", out, *INPUT, "--budget", smallest * 101 // 100)
    assert done.returncode == 0, done.stderr
    assert peak(out) <= smallest * 1.01
    fails(4, "rewrite", files.model("unet"), "--dry-run", *INPUT, "--budget", smallest * 9 // 10, says="smallest possible budget")


def test_batch_sizes_and_fit(files):
    fit = 12 << 20  # up to some batch of 12 the convolutions take the same kernels as at 2
    out, report = files.planned("unet", "60%", IMAGE, "--batch-sizes", "2,4,1", "--fit", str(fit), "--optimizer-states", "2")
    p = report["predicted"]
    two, four, one = p["batch_sizes"]
    assert [b["batch"] for b in p["batch_sizes"]] == [2, 4, 1] and one["peak_bytes"] < two["peak_bytes"]
    assert abs(two["peak_bytes"] - p["peak_bytes"]) <= 0.02 * p["peak_bytes"]
    measured = peak(out, "4x3x64x64")
    assert abs(four["peak_bytes"] - measured) <= 0.03 * measured
    module = torch.jit.load(str(out))
    weights = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    gradients = sum(t.nbytes for t in module.parameters())
    assert p["weights_bytes"] == weights and p["gradient_and_optimizer_bytes"] == 3 * gradients
    assert four["total_bytes"] == four["peak_bytes"] + weights + 3 * gradients + 4 * 3 * 64 * 64 * 4
    batch = p["fit"]["batch"]
    assert p["fit"]["bytes"] == fit and 0 < p["fit"]["total_bytes"] <= fit and batch > 4
    spec = f"{batch}x3x64x64"
    assert peak(out, spec) + weights + 3 * gradients + 4 * batch * 3 * 64 * 64 <= 1.03 * fit


def test_fit_without_a_budget_takes_the_smallest_peak(files, tmp_path):
    done = run("rewrite", files.model("residual"), "--dry-run", *INPUT, "--fit", "1KiB", "--json", tmp_path / "out.json")
    assert done.returncode == 0 and "No batch fits" in done.stdout
    p = json.loads((tmp_path / "out.json").read_text())["predicted"]
    smallest = files.front("residual")["smallest_budget"]
    assert p["fit"]["batch"] == 0 and abs(p["peak_bytes"] - smallest) <= 0.01 * smallest


def test_amp(files):
    done = run("plan", files.model("unet"), *INPUT, "--amp", "bf16", "--points", "2", "--json", "-")
    front = json.loads(done.stdout)
    check_front(front)
    # Without oneDNN's kernels in bfloat16 a convolution makes a matrix of its windows.
    assert front["smallest_budget"] < files.front("unet")["smallest_budget"] or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    out, report = files.planned("unet", front["smallest_budget"] * 101 // 100, IMAGE, "--amp", "bf16")
    p, measured = report["predicted"], peak(out)
    assert measured <= p["budget"] and abs(measured - p["peak_bytes"]) <= 0.02 * p["peak_bytes"]


@pytest.mark.parametrize("budget", ("100%", "70%", "60%"))
def test_kept_activations_need_what_was_promised(budget, tmp_path):
    """An activation whose output is kept still recomputes its input, in the written file as in what was measured."""
    model, inputs = models.cached("norms", "trace")
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--inputs", f"@{inputs}", "--budget", budget, "--no-verify", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    (x,) = torch.load(inputs)
    assert peak(tmp_path / "out.pt", "x".join(map(str, x.shape))) == json.loads((tmp_path / "out.json").read_text())["predicted"]["peak_bytes"]


def test_checkpoint_and_budget(files, tmp_path):
    out = tmp_path / "out.pt"
    done = run("rewrite", files.model("unet"), "-o", out, *INPUT, "--checkpoint", "down.0", "--budget", "70%", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert any(r["recomputed"] == ["all of forward"] for r in report["regions"])
    assert peak(out) <= report["predicted"]["budget"]


@pytest.mark.parametrize("name", ("control-flow", "containers", "interface", "norms"))
def test_other_models(name, tmp_path):
    """What is planned for the smallest peak passes rewrite's own verification."""
    model, inputs = models.cached(name)
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--inputs", f"@{inputs}", "--fit", "1GiB", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    p = json.loads((tmp_path / "out.json").read_text())["predicted"]
    assert p["peak_bytes"] <= p["original_peak_bytes"] and p["seconds"] > 0


# Wrong usage.


@pytest.mark.parametrize(
    "options, says",
    [
        (["--level", "ops", "--budget", "60%", *INPUT], ["--level ops", "--budget", "exclude"]),
        (["--level", "regions", "--budget", "60%", *INPUT], ["--level regions", "--budget", "exclude"]),
        (["--level", "plan", *INPUT], "--budget 2GiB"),
        (["--batch-sizes", "1,2", *INPUT], "--budget 2GiB"),
        (["--budget", "60%"], "--input"),
        (["--budget", "abc", *INPUT], "'abc'"),
        (["--budget", "-1", *INPUT], "--budget"),
        (["--budget", "0", *INPUT], "'0'"),
        (["--budget", "", *INPUT], "--budget"),
        (["--budget", "0%", *INPUT], "'0%'"),
        (["--budget", "nan", *INPUT], "'nan'"),
        (["--budget", "5%%", *INPUT], "'5%%'"),
        (["--budget", "1e30GiB", *INPUT], "1e30GiB"),
        (["--budget", "60%", "--batch-sizes", "0,x", *INPUT], "'0,x'"),
        (["--budget", "60%", "--batch-sizes", "1,,2", *INPUT], "'1,,2'"),
        (["--budget", "60%", "--batch-sizes", "", *INPUT], "--batch-sizes"),
        (["--fit", "60%", *INPUT], "'60%'"),
        (["--optimizer-states", "2", *INPUT], "--optimizer-states"),
        (["--optimizer-states", "2", "--budget", "60%", *INPUT], "--optimizer-states"),
        (["--restore", "--budget", "60%"], ["--restore", "--budget", "exclude"]),
        (["--restore", "--fit", "1GiB"], ["--restore", "--fit", "exclude"]),
    ],
)
def test_wrong_options(files, tmp_path, options, says):
    fails(2, "rewrite", files.model("unet"), "-o", tmp_path / "out.pt", *options, says=says)
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_of_plan(files, tmp_path):
    model = files.model("unet")
    fails(2, "plan", model, says="--input")
    fails(2, "plan", model, *INPUT, "--plot", tmp_path / "x.txt", says="x.txt")
    fails(2, "plan", model, *INPUT, "--points", "1", says="--points")
    fails(2, "plan", model, *INPUT, "--plot", tmp_path / "x.svg", "--json", tmp_path / "x.svg", says="same file")
    fails(2, "plan", model, *INPUT, "--json", model, says="--json")
    fails(2, "plan", model, *INPUT, "--method", "forwrad", says="forwrad")
    fails(3, "plan", model, *INPUT, "--plot", tmp_path / "missing" / "x.svg", says="no directory")
    fails(3, "plan", tmp_path / "nowhere.pt", *INPUT, says="nowhere.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ("2x5x64x64", "3:int", "2x3x63x64"))
def test_input_that_does_not_fit(files, tmp_path, spec):
    fails(3, "plan", files.model("unet"), "--input", spec)
    fails(3, "rewrite", files.model("unet"), "-o", tmp_path / "out.pt", "--input", spec, "--budget", "60%")
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused_before_the_work(files, tmp_path):
    (tmp_path / "out.pt").write_text("precious")
    fails(2, "rewrite", files.model("unet"), "-o", tmp_path / "out.pt", *INPUT, "--budget", "1KiB", says="--force")
    assert (tmp_path / "out.pt").read_text() == "precious"


@pytest.mark.parametrize("name", ("unet", "residual", "resnet18"))
def test_estimate_runs_nothing_and_is_near(files, name, tmp_path):
    """From shapes alone, the peak is near what a step needs, also where no memory would do."""
    spec = "8x3x96x96"
    out, predicted = files.planned(name, "70%", spec, "--estimate")
    predicted = predicted["predicted"]
    assert predicted["peak_bytes"] <= 0.7 * predicted["original_peak_bytes"] * 1.001
    # oneDNN's copies are guessed, and matter most where there are few channels.
    near = 0.03 if name == "resnet18" else 0.15
    assert peak(out, spec) == pytest.approx(predicted["peak_bytes"], rel=near)
    assert peak(files.model(name), spec) == pytest.approx(predicted["original_peak_bytes"], rel=near)
    assert run("verify", files.model(name), out, "--input", "2x3x64x64", "--calls", "2").returncode == 0
    done = run("rewrite", files.model(name), "-o", tmp_path / "huge.pt", "--input", "4096x3x512x512", "--estimate", "--budget", "60%",
               "--batch-sizes", "64", "--fit", "80GiB", "--optimizer-states", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The largest batch in 80.0 GiB: " in done.stdout and "batch 64: " in done.stdout


def test_estimate_of_a_traced_model(tmp_path):
    """Its constants are tensors, which TorchScript compares."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3),
                              torch.nn.BatchNorm2d(16), torch.nn.ReLU())  # fmt: skip
    path, new = tmp_path / "traced.pt", tmp_path / "new.pt"
    torch.jit.trace(net.train(), torch.randn(4, 3, 32, 32), check_trace=False).save(str(path))
    done = run("rewrite", path, "-o", new, "--input", "4x3x32x32", "--estimate", "--budget", "95%")
    assert done.returncode == 0, done.stderr
    assert "Plan: peak" in done.stdout


def test_estimate_of_nothing_known(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(64))

        def forward(self, x):
            return (x * self.w).exp()

    torch.jit.script(Scaled()).save(str(tmp_path / "m.pt"))
    done = run("rewrite", tmp_path / "m.pt", "-o", tmp_path / "o.pt", "--input", "64x32x64", "--budget", "100%", "--estimate", "--json", tmp_path / "r.json")
    assert done.returncode == 0 and "nan" not in done.stdout, done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["predicted"]["gap"] == 0


def test_estimate_of_autocast_is_refused(files, tmp_path):
    fails(2, "plan", files.model("unet"), *INPUT, "--estimate", "--amp", "bf16", says=["exclude each other"])
    fails(2, "rewrite", files.model("unet"), "-o", tmp_path / "x.pt", *INPUT, "--estimate", "--amp", "bf16", "--budget", "50%", says=["exclude each other"])


def test_estimate_names_the_operator_without_a_shape(files, tmp_path):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.histc(x.relu(), 4)

    torch.jit.script(Odd()).save(str(tmp_path / "odd.pt"))
    fails(3, "plan", tmp_path / "odd.pt", *INPUT, "--estimate", says=["estimated from shapes", "--estimate"])
