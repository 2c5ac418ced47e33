"""The command line's commands on models that are fine."""
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
from typing import Tuple

import pytest
import torch

from command_line import BINARY, SPEC, Net, fails, run, save_net

COMMANDS = ["rewrite", "diff", "profile", "verify", "plan", "import", "inspect", "patterns", "completion"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_net(tmp_path_factory.mktemp("model") / "net.pt")


@pytest.fixture(scope="module")
def rewritten(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("rewritten") / "net.mem.pt"
    done = run("rewrite", model, "-o", out)
    assert done.returncode == 0, done.stderr
    return out


def extra_file(path, name):
    reader = torch._C.PyTorchFileReader(str(path))
    return bytes(reader.get_record("extra/" + name)) if reader.has_record("extra/" + name) else None


# Help and version.


def test_help_has_an_example_for_every_command():
    done = run("--help")
    assert done.returncode == 0 and "Example: tsmem" in done.stdout and done.stderr == ""
    for command in COMMANDS:
        assert command in done.stdout
        own = run(command, "--help")
        assert own.returncode == 0 and f"tsmem {command}" in own.stdout.split("Example", 1)[1], own.stdout
        assert own.stdout.rstrip().endswith("tsmem --help"), own.stdout  # has the options of every command


def test_version():
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tsmem ") and f"LibTorch {torch.__version__.split('+')[0]}" in done.stdout


def test_common_options_before_and_after_the_command(model):
    assert run("-q", "diff", model, model).stdout == run("diff", model, model, "-q").stdout == ""
    before = run("--color", "always", "patterns").stdout
    assert before == run("patterns", "--color=always").stdout and "\033[" in before


def test_colors(model, rewritten):
    assert "\033[" not in run("diff", model, rewritten).stdout  # not a terminal
    colored = run("diff", model, rewritten, "--color", "always").stdout
    assert "\033[31m" in colored and "\033[32m" in colored
    assert "\033[" not in run("diff", model, rewritten, "--color", "never").stdout


# rewrite


def test_instances_that_module_skips_are_said_at_once(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--module", "block1.**")
    assert done.returncode == 0, done.stderr
    assert "--module: " in done.stdout and "shares its class with" in done.stdout and "block2" in done.stdout
    assert "shares its class" not in run("rewrite", model, "-o", tmp_path / "all.pt", "--module", "block*.**").stdout


@pytest.mark.parametrize("budget, asks", [("40", ["40% of the original's peak", "40MiB?"]), ("500", ["500MiB?"])])
def test_a_budget_of_a_few_bytes_is_asked_about(model, tmp_path, budget, asks):
    fails_in = run("rewrite", model, "-o", tmp_path / "out.pt", "--budget", budget, "--input", SPEC)
    assert fails_in.returncode == 2 and all(part in fails_in.stderr for part in asks), fails_in.stderr


def test_rewrite_takes_threads_and_a_device(model, tmp_path):
    assert run("rewrite", model, "-o", tmp_path / "out.pt", "--input", SPEC, "--threads", "1", "--device", "cpu").returncode == 0
    fails(2, "rewrite", model, "-o", tmp_path / "x.pt", "--device", "tpu", says="use cpu, cuda or cuda:N")
    assert run("rewrite", model, "-o", tmp_path / "x.pt", "--threads", "0").returncode == 2


def test_rewrite_tells_what_it_did(model, tmp_path):
    out = tmp_path / "out.pt"
    done = run("rewrite", model, "-o", out)
    assert done.returncode == 0 and done.stderr == ""
    assert "bn-act" in done.stdout and str(out) in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["out.pt"]


def test_rewrite_verifies_with_an_input(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--input", SPEC)
    assert done.returncode == 0, done.stderr
    assert "Verified" in done.stdout and (tmp_path / "out.pt").exists()


def test_rewrite_without_verification(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--input", "2x3x16x16", "--no-verify")
    assert done.returncode == 0 and "Verified" not in done.stdout and (tmp_path / "out.pt").exists()


def test_rewrite_json(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"tool", "version", "input", "output", "matches", "refused", "regions", "stays", "saved", "predicted"}
    assert report["tool"] == "tsmem" and report["predicted"] is None
    assert report["input"] == str(model) and report["output"] == str(tmp_path / "out.pt")
    assert report["matches"]
    for match in report["matches"]:
        assert set(match) == {"pattern", "module", "method", "nodes", "op"}
        assert match["nodes"] and "tsmem::" in match["op"]
    assert {"block1", "block2"} <= {match["module"].split(".")[0] for match in report["matches"]}
    assert {"module": "block1", "method": "forward", "kept": ["conv: aten::conv2d"], "recomputed": ["relu: aten::relu_"]} in report["regions"]


def test_level_ops_has_no_regions(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--level", "ops", "--input", SPEC, "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["matches"] and report["regions"] == []
    assert not {"linear", "cat", "add", "mul", "layer-norm"} & {match["pattern"] for match in report["matches"]}


def test_checkpoint(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--checkpoint", "block*", "--input", SPEC, "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    regions = json.loads((tmp_path / "report.json").read_text())["regions"]
    assert {"module": "block1", "method": "forward", "kept": ["its arguments"], "recomputed": ["all of forward"]} in regions
    assert "module calls keep their arguments alone" in done.stdout
    assert run("rewrite", tmp_path / "out.pt", "-o", tmp_path / "back.pt", "--restore").returncode == 0
    assert run("diff", model, tmp_path / "back.pt").returncode == 0
    fails(2, "rewrite", model, "-o", tmp_path / "x.pt", "--checkpoint", "nothing.*", says=["to checkpoint matches 'nothing.*'; 'tsmem inspect' lists them."])
    fails(2, "rewrite", model, "-o", tmp_path / "x.pt", "--checkpoint", "block1.relu", says=["name both or neither"])
    fails(2, "rewrite", model, "-o", tmp_path / "x.pt", "--checkpoint", "*.relu", says=["block1.relu", "overwrites its argument"])
    fails(2, "rewrite", model, "-o", tmp_path / "x.pt", "--restore", "--checkpoint", "block1", says=["exclude each other"])


class OverwritesAnArgumentLater(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3))

    def forward(self, x):
        y = torch.exp(x)
        z = self.block(y)
        y.mul_(2.0)
        return z + y


def test_checkpoint_of_a_call_whose_argument_is_overwritten_later(tmp_path):
    torch.jit.script(OverwritesAnArgumentLater()).save(str(tmp_path / "model.pt"))
    fails(2, "rewrite", tmp_path / "model.pt", "-o", tmp_path / "x.pt", "--checkpoint", "block", says=["can't wrap block", "an argument of its method forward is overwritten later (aten::mul_)"])


class DrawsForNothing(torch.nn.Module):
    class Inner(torch.nn.Module):
        def forward(self, x) -> Tuple[torch.Tensor, torch.Tensor]:
            return torch.dropout(x, 0.5, self.training), x.exp()

    class Within(torch.nn.Module):
        def forward(self, x):
            dropped = torch.dropout(x, 0.5, self.training)
            return x.exp()

    def __init__(self):
        super().__init__()
        self.block, self.within = self.Inner(), self.Within()

    def forward(self, x):
        dropped, y = self.block(x)
        return self.within(y)


def test_checkpoint_of_a_call_that_draws_for_nothing(ops, tmp_path):
    """TorchScript drops the dropout, and draws nothing: wrapped, it would be drawn. What is unused within the method is dropped there as well."""
    torch.jit.script(DrawsForNothing()).save(str(tmp_path / "model.pt"))
    fails(2, "rewrite", tmp_path / "model.pt", "-o", tmp_path / "x.pt", "--checkpoint", "block", says=["can't wrap block", "its method forward draws random numbers for a result that nothing uses (aten::dropout)"])
    assert run("rewrite", tmp_path / "model.pt", "-o", tmp_path / "x.pt", "--checkpoint", "within").returncode == 0
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    torch.jit.load(str(tmp_path / "x.pt"))(torch.rand(4, generator=torch.Generator(), requires_grad=True)).sum().backward()
    assert torch.equal(torch.random.get_rng_state(), state)


class CallsThatAreNotUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.never = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(3))
        self.both = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, x):
        self.unused(x)
        for m in self.both:
            x = m(x)
        return self.used(x)


def test_checkpoint_of_what_is_not_wrapped(tmp_path):
    torch.jit.script(CallsThatAreNotUsed()).save(str(tmp_path / "model.pt"))
    options = [x for glob in ("used", "unused", "never", "both") for x in ("--checkpoint", glob)]
    for more in (["-o", tmp_path / "out.pt"], ["--dry-run"]):
        done = run("rewrite", tmp_path / "model.pt", *more, *options, "--json", tmp_path / "report.json")
        assert done.returncode == 0, done.stderr
        said = {"unused": "not wrapped, as nothing uses the result of its call", "never": "not wrapped, as no method that is rewritten calls it", "both": "'both.*' names the modules in it"}
        for module, reason in said.items():
            assert [line for line in done.stdout.splitlines() if line.startswith(f"--checkpoint {module}: ") and reason in line], done.stdout
        refused = {r["module"]: r["reason"] for r in json.loads((tmp_path / "report.json").read_text())["refused"] if r["pattern"] == "checkpoint"}
        assert refused.keys() == said.keys() and all(reason in refused[module] for module, reason in said.items())


class CallInAutocast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.block(x)


def test_checkpoint_of_a_call_in_an_autocast_block(tmp_path):
    """TorchScript's casts would end at the operator that calls the method: the result would be float32."""
    torch.jit.script(CallInAutocast()).save(str(tmp_path / "model.pt"))
    done = run("rewrite", tmp_path / "model.pt", "-o", tmp_path / "out.pt", "--checkpoint", "block", "--input", "2x4")
    assert done.returncode == 0, done.stderr
    assert "--checkpoint block: it is not wrapped, as its method is called inside an autocast block" in done.stdout
    assert torch.jit.load(str(tmp_path / "out.pt"))(torch.randn(2, 4)).dtype == torch.bfloat16


class OnlyAnUnusedCall(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = torch.nn.Linear(4, 4)

    def forward(self, x):
        self.block(x)
        return x.cos()


class NothingButAnAutocastBlock(torch.nn.Module):
    """What its linear layer's own code has a match for is left out, so its call stays."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.norm(self.linear(x))


def test_what_is_written_is_said(tmp_path):
    """Unchanged is what is unchanged."""
    torch.jit.script(OnlyAnUnusedCall()).save(str(tmp_path / "model.pt"))

    def last_line(source, *options):
        done = run("rewrite", source, "-o", tmp_path / "out.pt", "--force", *options)
        assert done.returncode == 0, done.stderr
        same = run("diff", source, tmp_path / "out.pt", "-q").returncode == 0
        return done.stdout.splitlines()[-1], same

    line, same = last_line(tmp_path / "model.pt", "--only", "conv")
    assert line.startswith("Written unchanged") and same
    torch.jit.script(NothingButAnAutocastBlock()).save(str(tmp_path / "autocast.pt"))
    line, same = last_line(tmp_path / "autocast.pt")
    assert line.startswith("Written unchanged") and same
    line, same = last_line(tmp_path / "model.pt", "--only", "conv", "--checkpoint", "block")
    assert "unchanged" in line if same else "calls are inlined and nothing else" in line
    line, _ = last_line(tmp_path / "model.pt", "--only", "conv", "--freeze", "block.weight")
    assert "requires_grad is set as asked and nothing else" in line
    assert run("rewrite", tmp_path / "model.pt", "-o", tmp_path / "rewritten.pt").returncode == 0
    line, same = last_line(tmp_path / "rewritten.pt", "--only", "conv")
    assert "the original methods are restored and nothing else" in line and not same


def test_rewrite_json_on_stdout_is_json_alone(model):
    done = run("rewrite", model, "--dry-run", "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["output"] is None


def test_rewrite_json_on_stdout_with_an_output(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--input", SPEC, "--explain", "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["output"] == str(tmp_path / "out.pt")


def test_dry_run_writes_nothing(model, tmp_path):
    done = run("rewrite", model, "--dry-run", "-o", tmp_path / "out.pt")
    assert done.returncode == 0 and "Nothing was written" in done.stdout and list(tmp_path.iterdir()) == []


def test_dry_run_of_a_rewritten_model(model, rewritten):
    of = lambda path: json.loads(run("rewrite", path, "--dry-run", "--json", "-").stdout)["matches"]
    assert of(rewritten) == of(model)


def test_quiet(model, tmp_path):
    done = run("-q", "rewrite", model, "-o", tmp_path / "out.pt")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_verbose_lists_every_match(model, tmp_path):
    done = run("-v", "rewrite", model, "-o", tmp_path / "out.pt")
    assert done.returncode == 0 and "block2" in done.stdout and "tsmem::batch_norm_act" in done.stdout


def test_explain(model):
    done = run("rewrite", model, "--dry-run", "--explain", "--skip", "bn-act")
    assert done.returncode == 0
    assert "almost matched" in done.stdout.lower()


def test_only_and_skip(model):
    patterns = lambda *options: {
        m["pattern"] for m in json.loads(run("rewrite", model, "--dry-run", "--json", "-", *options).stdout)["matches"]
    }
    assert patterns("--only", "bn-act") == {"bn-act"}
    assert "bn-act" not in patterns("--skip", "bn-act")


def test_freeze_and_train(model, tmp_path):
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--freeze", "**", "--train", "head.*", "--input", SPEC)
    assert done.returncode == 0, done.stderr
    again = run("inspect", tmp_path / "out.pt", "--json", "-")
    assert json.loads(again.stdout)["trainable"] == 4 * 3 + 3


def test_nothing_to_rewrite_is_written_all_the_same(tmp_path):
    torch.jit.script(torch.nn.Identity()).save(tmp_path / "id.pt")
    done = run("rewrite", tmp_path / "id.pt", "-o", tmp_path / "out.pt")
    assert done.returncode == 0 and "nothing to rewrite" in done.stdout
    assert torch.equal(torch.jit.load(tmp_path / "out.pt")(torch.ones(2)), torch.ones(2))


def test_restore_gives_the_original_back(model, rewritten, tmp_path):
    done = run("rewrite", rewritten, "-o", tmp_path / "back.pt", "--restore", "--input", SPEC)
    assert done.returncode == 0, done.stderr
    same = run("diff", model, tmp_path / "back.pt")
    assert same.returncode == 0 and "No difference" in same.stdout, same.stdout
    x = torch.randn(2, 4, 8, 8)  # PyTorch's ops alone: loads here, where the op library is not
    assert torch.equal(torch.jit.load(model)(x), torch.jit.load(tmp_path / "back.pt")(x))
    assert extra_file(rewritten, "tsmem.json") and not extra_file(tmp_path / "back.pt", "tsmem.json")


def test_extra_files_are_carried_over(tmp_path):
    save_net(tmp_path / "net.pt", **{"labels.txt": "cat\ndog", "deep/config.json": "{}", "bytes.bin": b"\x00\xff\x00"})
    for source, out, options in [("net.pt", "mem.pt", []), ("mem.pt", "back.pt", ["--restore"])]:
        done = run("rewrite", tmp_path / source, "-o", tmp_path / out, *options)
        assert done.returncode == 0, done.stderr
        assert extra_file(tmp_path / out, "labels.txt") == b"cat\ndog"
        assert extra_file(tmp_path / out, "deep/config.json") == b"{}"
        assert extra_file(tmp_path / out, "bytes.bin") == b"\x00\xff\x00"
    about = json.loads(extra_file(tmp_path / "mem.pt", "tsmem.json"))
    assert about["tool"] == "tsmem" and about["matches"] and about["options"]["level"] == "regions"


def test_mode_bits_are_a_new_files(model, tmp_path):
    old = os.umask(0o027)
    try:
        assert run("rewrite", model, "-o", tmp_path / "out.pt").returncode == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out.pt").stat().st_mode) == 0o640


def test_force_replaces_and_follows_links(model, tmp_path):
    (tmp_path / "real.pt").write_text("old")
    (tmp_path / "link.pt").symlink_to("real.pt")
    assert run("rewrite", model, "-o", tmp_path / "link.pt", "--force").returncode == 0
    assert (tmp_path / "link.pt").is_symlink() and (tmp_path / "real.pt").stat().st_size > 1000


def test_a_reader_that_stops_early_is_no_error(model, tmp_path):
    script = f"'{BINARY}' rewrite '{model}' -o '{tmp_path}/out.pt' -v | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "out.pt").exists()


# diff


def test_diff_of_a_model_with_itself(model):
    done = run("diff", model, model)
    assert done.returncode == 0 and "No difference" in done.stdout


def test_diff_shows_what_went_and_what_came(model, rewritten):
    done = run("diff", model, rewritten)
    assert done.returncode == 1 and done.stderr == ""
    assert "block1 (and 1 more): Block.forward" in done.stdout
    assert "tsmem::batch_norm_act" in done.stdout and "@@ " in done.stdout
    assert "___torch_mangle" not in done.stdout


def test_diff_stat(model, rewritten):
    done = run("diff", model, rewritten, "--stat")
    assert done.returncode == 1 and "@@" not in done.stdout and "tsmem::batch_norm_act x2" in done.stdout


def test_diff_json(model, rewritten):
    assert json.loads(run("diff", model, model, "--format", "json").stdout)["equal"] is True
    done = run("diff", model, rewritten, "--format", "json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["equal"] is False
    (block,) = [m for m in report["methods"] if m["path"] == "block1" and m["method"] == "forward"]
    assert block["status"] == "changed" and block["added_ops"]["tsmem::batch_norm_act"] == 1
    statuses = {m["status"] for m in report["methods"]}
    assert statuses <= {"same", "changed", "added", "removed"}


def test_diff_of_one_method(model, rewritten):
    done = run("diff", model, rewritten, "--method", "features", "--format", "json")
    assert {m["method"] for m in json.loads(done.stdout)["methods"]} == {"features"}


def test_diff_sees_a_changed_constant_and_wiring(tmp_path):
    class Plain(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x) - torch.sigmoid(x) * 2

    class Constant(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x) - torch.sigmoid(x) * 3

    class Wiring(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x) - torch.sigmoid(torch.relu(x)) * 2

    class Swapped(torch.nn.Module):
        def forward(self, x):
            a = torch.relu(x)
            return torch.sigmoid(x) * 2 - a

    for kind in (Plain, Constant, Wiring, Swapped):
        torch.jit.script(kind()).save(tmp_path / f"{kind.__name__}.pt")
    for kind in (Constant, Wiring, Swapped):
        done = run("diff", tmp_path / "Plain.pt", tmp_path / f"{kind.__name__}.pt")
        assert done.returncode == 1, kind
    again = torch.jit.load(tmp_path / "Plain.pt")  # values are numbered anew, classes named anew
    again.save(tmp_path / "again.pt")
    assert run("diff", tmp_path / "Plain.pt", tmp_path / "again.pt").returncode == 0


def test_diff_sees_added_modules_and_methods(model, tmp_path):
    class More(Net):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.Dropout()

        @torch.jit.export
        def more(self, x):
            return self.extra(x)

    torch.jit.script(More()).save(tmp_path / "more.pt")
    report = json.loads(run("diff", model, tmp_path / "more.pt", "--format", "json").stdout)
    status = {(m["path"], m["method"]): m["status"] for m in report["methods"]}
    assert status["extra", "forward"] == "added" and status["", "more"] == "added" and status["", "forward"] == "same"
    back = json.loads(run("diff", tmp_path / "more.pt", model, "--format", "json").stdout)
    assert {(m["path"], m["method"]): m["status"] for m in back["methods"]}["extra", "forward"] == "removed"


# inspect, patterns, completion


def test_inspect(model, rewritten):
    done = run("inspect", model)
    assert done.returncode == 0, done.stderr
    for part in ("block1.conv", "BatchNorm2d", "aten::batch_norm", "bn-act", "features"):
        assert part in done.stdout
    report = json.loads(run("inspect", model, "--json", "-").stdout)
    assert report["parameters"] == sum(p.numel() for p in Net().parameters()) == report["trainable"]
    assert report["parameter_bytes"] == 4 * report["parameters"] and report["rewritten"] is False
    assert {m["name"] for m in report["methods"]} == {"forward", "features"}
    again = json.loads(run("inspect", rewritten, "--json", "-").stdout)
    assert again["rewritten"] is True and again["matches"] == report["matches"] and again["parameters"] == report["parameters"]


def test_patterns():
    listed = run("patterns")
    assert listed.returncode == 0 and "bn-act" in listed.stdout
    one = run("patterns", "bn-act")
    assert one.returncode == 0 and "tsmem::batch_norm_act" in one.stdout and "batch_norm(" in one.stdout


def complete(*words):
    script = (
        f'source <("{BINARY}" completion bash); COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _tsmem; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()


def test_bash_completion(tmp_path):
    assert complete("tsmem", "re") == ["rewrite"]
    assert complete("tsmem", "rewrite", "--dr") == ["--dry-run"]
    assert complete("tsmem", "-q", "diff", "--format", "j") == ["json"]
    assert complete("tsmem", "diff", "--colo") == ["--color"]
    assert complete("tsmem", "completion", "") == ["bash", "zsh", "fish"]
    (tmp_path / "model.pt").touch()
    assert complete("tsmem", "rewrite", f"{tmp_path}/mo") == [f"{tmp_path}/model.pt"]
    assert complete("tsmem", "rewrite", "m.pt", "-o", f"{tmp_path}/mo") == [f"{tmp_path}/model.pt"]


def test_completion_knows_every_option():
    for shell in ("bash", "zsh", "fish"):
        script = run("completion", shell)
        assert script.returncode == 0
        for option in ("restore", "dry-run", "stat", "color", "ops"):
            assert option in script.stdout, (shell, option)
        if shutil.which(shell):
            checked = subprocess.run([shell, "-n"], input=script.stdout, capture_output=True, text=True)
            assert checked.returncode == 0, (shell, checked.stderr)


# plan has a file of tests of its own.


def test_help_knows_what_plans_take():
    help = run("rewrite", "--help").stdout
    for option in ("--budget", "--batch-sizes", "--fit", "--optimizer-states"):
        assert option in help


def test_a_level_needs_what_it_plans_with(model, tmp_path):
    fails(2, "rewrite", model, "-o", tmp_path / "out.pt", "--level", "plan", says=["--budget"])
    fails(2, "rewrite", model, "-o", tmp_path / "out.pt", "--budget", "2GiB", says=["--input"])
    fails(2, "rewrite", model, "-o", tmp_path / "out.pt", "--optimizer-states", "2", says=["--optimizer-states"])
    fails(2, "plan", model, says=["--input"])
    assert list(tmp_path.iterdir()) == []
    done = run("plan", model, "--input", SPEC, "--points", "2")
    assert done.returncode == 0 and "smallest budget" in done.stdout and done.stderr == ""


def page_data(html):
    """The data of one of tsmem's pages, which must need nothing from elsewhere."""
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", html)
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_diff_html(model, rewritten):
    done = run("diff", model, rewritten, "--format", "html")
    assert done.returncode == 1
    data = page_data(done.stdout)
    changed = [m for m in data["methods"] if m["status"] != "same"]
    text = run("diff", model, rewritten, "--format", "json").stdout
    assert len(changed) == len([m for m in json.loads(text)["methods"] if m["status"] != "same"]) > 0
    assert any("tsmem::batch_norm_act" in m["added"] for m in changed)
    for method in changed:
        for side, other in ((0, 2), (2, 0)):  # every line once, in order
            numbers = [row[side] for row in method["rows"] if row[side] is not None]
            assert numbers == list(range(1, len(numbers) + 1))
        assert all((a == b) == equal for _, a, _, b, equal in method["rows"])
        assert not all(row[4] for row in method["rows"])
    same = run("diff", model, model, "--format", "html")
    assert same.returncode == 0 and not any(m["rows"] for m in page_data(same.stdout)["methods"])
    fails(2, "diff", model, model, "--format", "html", "--stat", says="--stat")


def test_operators_of_torchvision_are_found_beside_torch(tmp_path):
    """A detection model's file needs no --ops; it can be given all the same. Nothing is asked of roi_align's derivative: docs/troubleshooting.md."""
    torchvision = pytest.importorskip("torchvision")

    class Boxes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3)
            self.bn = torch.nn.BatchNorm2d(8)

        def forward(self, x, boxes):
            return torch.relu(self.bn(self.conv(torchvision.ops.roi_align(x, [boxes], 3))))

    model, new = tmp_path / "model.pt", tmp_path / "new.pt"
    torch.jit.script(Boxes()).save(str(model))
    torch.save((torch.randn(1, 3, 16, 16), torch.tensor([[0.0, 0.0, 8.0, 8.0]])), tmp_path / "inputs.pt")
    (library,) = pathlib.Path(torchvision.__file__).parent.glob("_C*.so")
    for options in ([], ["--ops", str(library)]):
        done = run("rewrite", model, "-o", new, "--force", "--inputs", f"@{tmp_path / 'inputs.pt'}", *options)
        assert done.returncode == 0, done.stderr
    assert json.loads(extra_file(new, "tsmem.json"))["matches"]


@torch.jit.script
class Coder:
    def __init__(self, scale: float):
        self.scale = scale

    def encode(self, x: torch.Tensor):
        return x * self.scale


class WithCoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.coder = Coder(2.0)

    def encode(self, coder: Coder, x: torch.Tensor):
        return coder.encode(x)

    def forward(self, x):
        return self.encode(self.coder, torch.relu(self.conv(x)))


def test_diff_of_a_model_with_classes_of_its_own(tmp_path):
    """A class is printed with its name alone, not with an address that differs from file to file."""
    a, b, c = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt"))
    torch.jit.script(WithCoder()).save(str(a))
    assert run("rewrite", a, "-o", b).returncode == 0
    assert run("rewrite", b, "--restore", "-o", c).returncode == 0
    assert " at: 0x" not in run("diff", a, b).stdout
    assert run("diff", a, c).returncode == 0
