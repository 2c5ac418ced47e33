"""tsmem profile and tsmem verify, run as a user runs them, on small models scripted here."""
import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import allocator
import pytest
import torch
from command_line import BINARY, Residual, runs
from torch import nn


class Block(Residual):
    pass


class Net(nn.Module):
    def __init__(self, last=0):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.others = nn.ModuleList([Block(4)])
        self.head = nn.Linear(4, 5)
        self.last = last

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        for block in self.others:
            x = block(x)
        x = self.head(x.mean((2, 3)))
        return torch.sigmoid(x) if self.last else torch.tanh(x)

    @torch.jit.export
    def features(self, x, scale: float = 1.0):
        return self.stem(x) * scale


class Detector(nn.Module):
    """Arguments as detection models have them."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]] | None = None):
        total = torch.zeros(())
        for image in images:
            total = total + (image * self.w).sin().sum()
        if targets is not None:
            for t in targets:
                total = total + (t["boxes"] * self.w.sum()).sum()
        return {"loss": total}


def script(module, path):
    torch.jit.save(torch.jit.script(module), str(path))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    net = Net()
    script(net, folder / "net.pt")
    script(net, folder / "same.pt")
    net.last = 1
    script(net, folder / "math.pt")
    net.last = 0
    with torch.no_grad():
        net.head.weight.mul_(1.5)
    script(net, folder / "weights.pt")
    net.requires_grad_(False)
    script(net, folder / "frozen.pt")
    script(Detector(), folder / "detector.pt")
    return folder


SHAPE = ("--input", "2x3x8x8")


def test_fused_operators_count_for_the_modules_whose_parameters_they_read(models, tmp_path):
    out = tmp_path / "fused.pt"
    runs("rewrite", models / "net.pt", "-o", out)
    rows = {m["path"]: m for m in json.loads(runs("profile", out, *SHAPE, "--json", "-").stdout)["modules"]}
    for norm in ("blocks.0.norm", "blocks.1.norm", "others.0.norm"):
        assert rows[norm]["forward_bytes"] > 0 and rows[norm]["forward_seconds"] > 0, rows[norm]


def test_profile_vs_times_in_turns_and_says_how_far_to_trust_it(models, tmp_path):
    out = runs("profile", models / "net.pt", "--vs", models / "same.pt", *SHAPE, "--json", tmp_path / "p.json").stdout
    low, ratio, high = json.loads((tmp_path / "p.json").read_text())["vs"]["step_ratio"]
    assert 0 < low <= ratio <= high
    assert re.search(r"same.pt takes \d+\.\d\d of the time; the middle half of 5 pairs", out), out
    header = next(line for line in out.splitlines() if line.startswith("module "))
    columns = re.split(r"  +", header.strip())
    assert len(set(columns)) == len(columns), header


def test_profile_vs_names_the_file_that_fails(models):
    assert "net.pt" in runs("profile", models / "net.pt", "--input", "2x5x8x8", code=3).stderr


def test_verify_explains_its_columns(models):
    out = runs("verify", models / "net.pt", models / "same.pt", *SHAPE, "--no-measure").stdout
    assert "in the models' own dtype" in out and "float64: " in out


def test_profile_text(models):
    out = runs("profile", models / "net.pt", *SHAPE).stdout
    for word in ("saved for backward", "peak", "forward", "backward", "step", "(model)", "stem", "blocks", "Conv2d", "aten::conv2d"):
        assert word in out
    assert "BatchNorm2d" not in out  # folded at depth 2
    assert "--depth" in out
    assert "BatchNorm2d" in runs("profile", models / "net.pt", *SHAPE, "--depth", "-1").stdout
    assert "\x1b[" not in out
    assert "\x1b[" in runs("--color", "always", "profile", models / "net.pt", *SHAPE).stdout


def test_profile_json(models, tmp_path):
    report = tmp_path / "p.json"
    runs("profile", models / "net.pt", *SHAPE, "--json", report)
    p = json.loads(report.read_text())
    assert p["input_bytes"] == 2 * 3 * 8 * 8 * 4
    assert p["parameter_bytes"] == sum(t.numel() * 4 for t in Net().parameters())
    assert 0 < p["saved_bytes"] < p["peak_bytes"]
    assert sum(m["saved_bytes"] for m in p["modules"]) == p["saved_bytes"]
    live = peak = 0
    for e in p["timeline"]:
        assert e["phase"] in ("forward", "backward")
        live += e["bytes"]
        peak = max(peak, live)
    assert peak == p["peak_bytes"]
    rows = {m["path"]: m for m in p["modules"]}
    assert set(rows) == {n for n, _ in Net().named_modules()}
    # Lists whose members have the same names are told apart.
    for path in ("blocks.0.norm", "blocks.1.norm", "others.0.norm"):
        assert rows[path]["forward_bytes"] > 0 and rows[path]["backward_bytes"] > 0, path
    assert rows["blocks.0.conv"]["saved_bytes"] == rows["others.0.conv"]["saved_bytes"] > 0


def test_profile_agrees_with_pytorchs_profiler(models, tmp_path):
    report = tmp_path / "p.json"
    runs("profile", models / "net.pt", *SHAPE, "--json", report)
    m, x = torch.jit.load(str(models / "net.pt")), torch.randn(2, 3, 8, 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        m(x).backward(torch.ones(2, 5))
    with allocator.recorded() as prof:
        y = m(x)
    torch.set_num_threads(threads)
    live = sum(e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    assert json.loads(report.read_text())["saved_bytes"] == live - y.untyped_storage().nbytes()


def test_profile_json_to_stdout_is_json_alone(models):
    assert json.loads(runs("profile", models / "net.pt", *SHAPE, "--json", "-").stdout)["saved_bytes"] > 0


def test_profile_vs(models):
    out = runs("profile", models / "net.pt", *SHAPE, "--vs", models / "same.pt").stdout
    assert "ratio" in out and "1.00" in out


def test_profile_frozen_and_input_grad(models):
    assert "--input-grad" in runs("profile", models / "frozen.pt", *SHAPE).stdout
    p = json.loads(runs("profile", models / "frozen.pt", *SHAPE, "--input-grad", "--json", "-").stdout)
    assert p["has_backward"] and p["saved_bytes"] > 0


def test_profile_eval_method_and_scalars(models):
    runs("profile", models / "net.pt", *SHAPE, "--eval")
    out = runs("profile", models / "net.pt", *SHAPE, "--input", "0.5:float", "--method", "features").stdout
    assert "stem" in out and "head" not in out


def test_inputs_saved_by_torch_save(models, tmp_path):
    images = [torch.randn(3, 4, 5), torch.randn(3, 6, 4)]
    targets = [{"boxes": torch.rand(2, 4)}, {"boxes": torch.rand(1, 4)}]
    torch.save(images, tmp_path / "images.pt")
    torch.save(targets, tmp_path / "targets.pt")
    torch.save((tuple(images), targets), tmp_path / "all.pt")
    torch.save(images + [nn.Parameter(torch.ones(3, 2, 2))[:, 1:]], tmp_path / "view.pt")
    torch.save((images, None), tmp_path / "none.pt")
    for args in (
        ("--input", f"@{tmp_path}/images.pt"),
        ("--input", f"@{tmp_path}/images.pt", "--input", f"@{tmp_path}/targets.pt"),
        ("--inputs", f"@{tmp_path}/all.pt"),
        ("--inputs", f"@{tmp_path}/none.pt"),
        ("--input", f"@{tmp_path}/view.pt"),
    ):
        runs("profile", models / "detector.pt", *args)
        runs("verify", models / "detector.pt", models / "detector.pt", *args, "--calls", "1", "--seeds", "1", "--no-measure")


def test_verify_equal(models, tmp_path):
    report = tmp_path / "v.json"
    out = runs("verify", models / "net.pt", models / "same.pt", *SHAPE, "--json", report).stdout
    assert out.startswith("Equal")
    assert "saved for backward" in out
    v = json.loads(report.read_text())
    assert v["equal"] and v["state_dict_equal"]
    assert [c["mode"] for c in v["calls"]] == ["train"] * 4 + ["eval"] * 4 + ["no_grad"] * 4
    assert all(c["f64_error"] <= 1e-9 for c in v["calls"])
    assert v["gradients_only_in"] == {"a": [], "b": []}
    assert v["saved_bytes"][0] == v["saved_bytes"][1] > 0
    assert v["peak_bytes"][0] == v["peak_bytes"][1]
    assert min(v["step_seconds"]) > 0


def test_verify_modes_and_calls(models):
    args = ("verify", models / "net.pt", models / "same.pt", *SHAPE, "--no-measure", "--seeds", "1", "--calls", "2", "--json", "-")
    assert [c["mode"] for c in json.loads(runs(*args, "--train").stdout)["calls"]] == ["train"] * 2
    assert [c["mode"] for c in json.loads(runs(*args, "--eval").stdout)["calls"]] == ["eval"] * 2 + ["no_grad"] * 2


@pytest.mark.parametrize("other, says", [("weights.pt", "Parameter 'head.weight' has other values"), ("math.pt", "In float64 in train mode")])
def test_verify_different(models, other, says):
    out = runs("verify", models / "net.pt", models / other, *SHAPE, "--calls", "1", "--seeds", "1", "--no-measure", code=1).stdout
    assert says in out


class Breakable(nn.Module):

    def __init__(self, broken: bool):
        super().__init__()
        self.conv, self.broken = nn.Conv2d(3, 4, 3), broken

    def forward(self, x):
        assert not self.broken, "out of order"
        return self.conv(x).tanh()


def test_a_second_model_that_raises_is_to_blame(tmp_path):
    torch.manual_seed(0)
    good = Breakable(False)
    bad = Breakable(True)
    bad.load_state_dict(good.state_dict())
    script(good, tmp_path / "good.pt")
    script(bad, tmp_path / "bad.pt")
    for options in ([], ["--thorough"]):
        out = runs("verify", tmp_path / "good.pt", tmp_path / "bad.pt", *SHAPE, *options, code=1).stdout
        assert out.startswith("The second model's forward fails on call 1 in train mode") and "out of order" in out.splitlines()[0]
    assert "out of order" in one_sentence(runs("verify", tmp_path / "bad.pt", tmp_path / "good.pt", *SHAPE, code=3))


def test_verify_says_what_it_compared(models, tmp_path):
    args = ("verify", models / "net.pt", models / "same.pt", *SHAPE, "--no-measure", "--thorough")
    report = tmp_path / "v.json"
    assert "Compared: 5 calls each in train, eval on the inputs given (2x3x8x8 float32) in float32 and float64" in runs(*args, "--json", report).stdout
    v = json.loads(report.read_text())
    assert v["thorough"] and v["seconds"] > 0 and v["first_step_seconds"] > 0
    assert [(c["mode"], c["calls"]) for c in v["compared"]] == [("train", 5), ("eval", 5), ("no_grad", 4)]
    out = runs("rewrite", models / "net.pt", "-o", tmp_path / "new.pt", *SHAPE, "--thorough").stdout
    assert "Verified: Equal" in out and "Compared: " in out
    assert "--input" in one_sentence(runs("rewrite", models / "net.pt", "-o", tmp_path / "none.pt", "--thorough", code=2))


def test_progress_is_for_terminals(models):
    import pty

    args = [BINARY, "verify", models / "net.pt", models / "same.pt", *SHAPE, "--no-measure", "--thorough"]
    assert runs(*args[1:]).stderr == ""
    terminal, other = pty.openpty()
    done = subprocess.run([str(a) for a in args], stdout=subprocess.DEVNULL, stderr=other, timeout=300)
    os.close(other)
    shown = b""
    while True:
        try:
            shown += (data := os.read(terminal, 65536))
        except OSError:
            break
        if not data:
            break
    assert done.returncode == 0 and b"[#" in shown and b"train: call 2 of 5" in shown


def one_sentence(done):
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("tsmem: ") and "Traceback" not in done.stderr and "frame #" not in done.stderr
    assert len(lines) <= 2
    return lines[0]


@pytest.mark.parametrize(
    "args, code, says",
    [
        (("--input", "2x"), 2, "looks like 8x3x224x224"),
        (("--input", "2x3x8x8:f99"), 2, "not a dtype"),
        ((), 3, "forward takes 1 argument (x: Tensor)"),
        ((*SHAPE, *SHAPE), 3, "forward takes 1 argument"),
        (("--input", "3:int"), 3, "wants Tensor and got an int"),
        (("--input", "2x5x8x8"), 3, "channels"),
        (("--input", "@/no/such.pt"), 3, "does not exist"),
        ((*SHAPE, "--inputs", "@x.pt"), 2, "exclude each other"),
        ((*SHAPE, "--method", "encode"), 2, "no method 'encode'"),
        ((*SHAPE, "--device", "tpu"), 2, "use cpu, cuda or cuda:N"),
        (("--input", "1000000x1000000x3000"), 3, "more memory than there is"),
    ],
)
def test_errors(models, args, code, says):
    assert says in one_sentence(runs("profile", models / "net.pt", *args, code=code))
    assert says in one_sentence(runs("verify", models / "net.pt", models / "same.pt", *args, code=code))


def test_an_error_names_the_file(models):
    wrong = ("--input", "2x5x8x8")
    assert f"'{models / 'net.pt'}': The first model's forward fails" in one_sentence(runs("verify", models / "net.pt", models / "same.pt", *wrong, code=3))
    assert f"'{models / 'net.pt'}': The model's forward fails" in one_sentence(runs("profile", models / "net.pt", *wrong, code=3))


def test_pictures(models, tmp_path):
    plain, rewritten = models / "net.pt", tmp_path / "net.mem.pt"
    runs("rewrite", plain, "-o", rewritten)
    report = tmp_path / "report.json"
    for kind in ("svg", "png", "html"):
        picture = tmp_path / f"memory.{kind}"
        picture.write_text("replaced")
        runs("profile", plain, *SHAPE, "--vs", rewritten, "--plot", picture, "--json", report, "--trace", tmp_path / "trace.json")
        data, profiles = picture.read_bytes(), json.loads(report.read_text())
        if kind == "svg":
            texts = ["".join(e.itertext()) for e in ElementTree.fromstring(data).iter() if e.tag.endswith("text")]
            # One scale: the same marks on the axis twice; a peak each; the modules that the colours stand for.
            marks = [t for t in texts if t.endswith("MiB") or t.endswith("KiB")]
            assert len(marks) % 2 == 0 and sum(t.startswith("peak ") for t in texts) == 2
            assert {"stem", "blocks.0", "head"} <= set(texts) and {"forward", "backward"} <= set(texts)
        elif kind == "png":
            assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000
        else:
            page = json.loads(re.search(rb'id="data">(.*?)</script>', data, re.S)[1])
            assert not re.search(rb"(src|href)\s*=|https?://|@import", data)
            for drawn, told in zip(page["profiles"], (profiles, profiles["vs"])):
                assert drawn["peak"] == told["peak_bytes"] and drawn["saved"] == told["saved_bytes"]
                assert max(itertools.accumulate(drawn["bytes"])) == drawn["peak"]
                assert [m[0] for m in drawn["modules"]] == [m["path"] for m in told["modules"]]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for process, told in ((1, profiles), (2, profiles["vs"])):
        live = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == process]
        assert max(live) == told["peak_bytes"]
        assert {"forward", "backward"} == {e["cat"] for e in events if e["ph"] == "X" and e["pid"] == process}


def test_a_wide_model_has_more_than_one_colour(tmp_path):
    wide, picture = tmp_path / "wide.pt", tmp_path / "memory.svg"
    torch.jit.script(nn.Sequential(*(m for _ in range(15) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())))).save(str(wide))
    runs("profile", wide, "--input", "2x3x16x16", "--plot", picture)
    assert len(set(re.findall(r"fill='(#[0-9a-f]{6})'><title>", picture.read_text()))) > 8


@pytest.mark.parametrize("amp", ([], ["--amp", "bf16"]))
def test_what_operators_call_counts_for_its_modules(models, tmp_path, amp):
    """Methods that checkpoint and autocast operators call have call stacks of their own."""
    report, rewritten = tmp_path / "report.json", tmp_path / "new.pt"
    rows = {}
    for name, options in {"ops": [], "checkpoint": ["--checkpoint", "*s.0", "--checkpoint", "blocks.1"]}.items():
        runs("rewrite", models / "net.pt", "-o", rewritten, "--force", *options, *amp)
        runs("profile", rewritten, *SHAPE, "--json", report)
        rows[name] = {m["path"]: m for m in json.loads(report.read_text())["modules"]}
    for block in ("blocks.0", "blocks.1", "others.0"):
        before, after = (rows[name][block + ".conv"] for name in ("ops", "checkpoint"))  # the norm is a part of the block's own operator
        assert after["forward_bytes"] == before["forward_bytes"] > 0
        assert after["saved_bytes"] == 0 < before["saved_bytes"]
        # In backward the whole of it is one node's, which is the block's.
        assert rows["checkpoint"][block]["backward_bytes"] > 0


def test_modules_have_their_time(models, tmp_path):
    report = tmp_path / "report.json"
    runs("profile", models / "net.pt", *SHAPE, "--json", report)
    profile = json.loads(report.read_text())
    times = {m["path"]: (m["forward_seconds"], m["backward_seconds"]) for m in profile["modules"]}
    assert all(min(times[path]) > 0 for path in ("stem", "blocks.0.conv", "others.0.norm", "head"))
    recorded = profile["timeline"][-1]["t"]
    assert 0 < sum(map(sum, times.values())) <= 1.5 * recorded


def test_a_picture_that_cannot_be_drawn(models, tmp_path):
    model = models / "net.pt"
    assert "--plot" in one_sentence(runs("profile", model, *SHAPE, "--plot", tmp_path / "x.gif", code=2))
    assert "no directory" in one_sentence(runs("profile", model, *SHAPE, "--plot", tmp_path / "none" / "x.svg", code=3))
    assert "replace a model" in one_sentence(runs("profile", model, *SHAPE, "--trace", model, code=2))
    picture = tmp_path / "x.png"
    assert "another option" in one_sentence(runs("profile", model, *SHAPE, "--plot", picture, "--trace", picture, code=2))
    picture.write_text("old")
    assert "rsvg-convert" in one_sentence(runs("profile", model, *SHAPE, "--plot", picture, code=3, PATH=str(tmp_path)))
    assert picture.read_text() == "old"


def test_cuda_or_a_sentence(models):
    args = ("profile", models / "net.pt", *SHAPE, "--device", "cuda")
    if torch.cuda.is_available():
        assert "on cuda" in runs(*args).stdout
    else:
        assert "no CUDA device" in one_sentence(runs(*args, code=2))


def test_the_report_never_replaces_a_model(models):
    before = (models / "net.pt").read_bytes()
    runs("profile", models / "net.pt", *SHAPE, "--json", models / "net.pt", code=2)
    runs("verify", models / "net.pt", models / "same.pt", *SHAPE, "--calls", "1", "--seeds", "1", "--no-measure", "--json", models / "net.pt", code=2)
    assert (models / "net.pt").read_bytes() == before


@pytest.mark.parametrize("save, says", [(lambda p: torch.save({"a": torch.Size([2])}, p), "damaged, or nothing that PyTorch can read"), (lambda p: Path(p).write_text("text"), "torch.save")])
def test_bad_input_files(models, tmp_path, save, says):
    save(str(tmp_path / "x.pt"))
    assert says in one_sentence(runs("profile", models / "net.pt", "--input", f"@{tmp_path}/x.pt", code=3))


@pytest.mark.parametrize("command", ["profile", "verify"])
def test_help_has_an_example(command):
    assert f"Example: tsmem {command} model.pt" in runs(command, "--help").stdout


class Overwrites(nn.Module):
    """Its argument of integers, in training alone."""

    def __init__(self, by):
        super().__init__()
        self.linear, self.by = nn.Linear(3, 3), by

    def forward(self, x, n):
        if self.training:
            n.add_(self.by)
        return self.linear(x)


def test_verify_compares_what_becomes_of_inputs(tmp_path):
    for name, by in (("a.pt", 1), ("b.pt", 2), ("same.pt", 1)):
        torch.manual_seed(0)
        torch.jit.script(Overwrites(by)).save(str(tmp_path / name))
    inputs = ["--input", "2x3", "--input", "4:i64[0,9)", "--no-measure"]
    runs("verify", tmp_path / "a.pt", tmp_path / "same.pt", *inputs)
    runs("verify", tmp_path / "a.pt", tmp_path / "b.pt", *inputs, code=1)
