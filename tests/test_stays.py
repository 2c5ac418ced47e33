"""What `tsmem rewrite` says of what stays: by the graph alone, measured with an input, and for programs of torch.export."""
import json

import pytest
import small
import torch

from command_line import SPEC, Net, run, save_net


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.lstm = torch.nn.LSTM(16, 32, batch_first=True)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, words):
        return self.head(self.lstm(self.embedding(words))[0])


class Spectral(torch.nn.Module):
    """Its operator keeps what tsmem knows nothing of."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.linalg.matrix_exp(self.inner(x))


def rewritten(tmp_path, model, *options):
    """The report and what was printed."""
    path = tmp_path / "model.pt"
    if not path.exists():
        torch.jit.script(model).save(str(path))
    done = run("rewrite", path, "-o", tmp_path / "out.pt", "--force", "--json", tmp_path / "report.json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "report.json").read_text()), done.stdout


def test_without_an_input_stays_are_those_of_the_graph(tmp_path):
    report, text = rewritten(tmp_path, Net())
    assert report["stays"] and all(set(s) >= {"op", "module", "bytes", "reason"} and s["bytes"] is None for s in report["stays"])
    first, last = report["saved"]["tensors"]
    assert 0 < last < first and report["saved"]["bytes"] == [None, None]
    assert f"{last} of the original's {first} tensors" in text and "--budget" in text
    assert {s["module"] for s in report["stays"] if s["op"] == "tsmem::conv2d"} == {"block2.conv"}


def test_what_a_plan_keeps_is_not_said_to_want_a_budget(tmp_path):
    _, text = rewritten(tmp_path, small.UNet(), "--input", "2x3x32x32", "--budget", "85%")
    assert "by this plan it is kept" in text and "without a budget" not in text


def test_with_an_input_bytes_are_measured(tmp_path):
    report, text = rewritten(tmp_path, Net(), "--input", SPEC)
    sizes = [s["bytes"] for s in report["stays"]]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == report["saved"]["bytes"][1] < report["saved"]["bytes"][0]
    assert "Saved for backward: " in text and "goes)" in text
    profiled = run("profile", tmp_path / "out.pt", "--input", SPEC, "--json", "-")
    assert json.loads(profiled.stdout)["saved_bytes"] == report["saved"]["bytes"][1]
    convolutions = {s["module"]: s for s in report["stays"] if s["op"] == "tsmem::conv2d"}
    assert set(convolutions) == {"block1.conv", "block2.conv"}
    assert "tsmem::batch_norm_act needs it" in convolutions["block1.conv"]["reason"]


@pytest.mark.parametrize("measured", [False, True])
def test_an_operator_without_one_of_ours_is_named_with_what_helps(tmp_path, measured):
    report, text = rewritten(tmp_path, Tagger(), *(["--input", "4x20:i64[0,50)"] if measured else []), "--only", "linear")
    stay = next(s for s in report["stays"] if s["op"] == "aten::lstm")
    assert stay["module"] == "lstm" and "aten::lstm" in stay["reason"]
    assert "--checkpoint 'lstm'" in text


def test_what_it_knows_nothing_of_is_said_to_be_unknown(tmp_path):
    report, text = rewritten(tmp_path, Spectral())
    assert any("nor knows what it keeps" in s["reason"] for s in report["stays"]), report["stays"]


def test_explain_says_more_than_that_nothing_almost_matched(tmp_path):
    _, text = rewritten(tmp_path, Spectral(), "--explain")
    assert "linalg_matrix_exp" in text or "matrix_exp" in text


class Frozen(torch.nn.Module):
    """Its trunk runs without grad."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        with torch.no_grad():
            y = torch.sigmoid(self.trunk(x))
        return self.head(y)


def test_under_no_grad_only_what_is_used_later_is_kept(tmp_path):
    report, _ = rewritten(tmp_path, Frozen())
    assert [(s["op"].split("::")[1], s["module"]) for s in report["stays"]] in ([("act", "")], [("sigmoid", "")], [("linear", "trunk")]), report["stays"]


def test_restore_and_quiet_say_nothing_of_it(tmp_path):
    model = save_net(tmp_path / "net.pt")
    assert run("rewrite", model, "-o", tmp_path / "a.pt", "-q").stdout == ""
    assert "Saved for backward" not in run("rewrite", tmp_path / "a.pt", "-o", tmp_path / "b.pt", "--restore").stdout


def test_a_dry_run_says_it_too(tmp_path):
    done = run("rewrite", save_net(tmp_path / "net.pt"), "--dry-run")
    assert "Saved for backward, by the graph" in done.stdout


def test_an_exported_program_knows_its_shapes(tmp_path):
    x = torch.randn(2, 4, 8, 8)
    torch.export.save(torch.export.export(Net(), (x,)), str(tmp_path / "net.pt2"))
    done = run("rewrite", tmp_path / "net.pt2", "-o", tmp_path / "out.pt2", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    first, last = report["saved"]["bytes"]
    assert 0 < last < first
    assert {s["module"] for s in report["stays"] if s["op"] == "tsmem::conv2d"} == {"block1.conv", "block2.conv"}


@pytest.mark.parametrize("level", ["ops", "regions"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "convnext_tiny"])
def test_the_graph_names_what_a_run_keeps(tmp_path, name, level):
    """Of the measured bytes, nine tenths are of operators and modules that the graph alone had named."""
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    static, _ = rewritten(tmp_path, model, "--level", level)
    measured, _ = rewritten(tmp_path, model, "--level", level, "--input", "2x3x96x96", "--no-verify")
    named = {(s["op"], s["module"]) for s in static["stays"]}
    total = sum(s["bytes"] for s in measured["stays"])
    missing = [(s["op"], s["module"], s["bytes"]) for s in measured["stays"] if (s["op"], s["module"]) not in named]
    assert sum(m[2] for m in missing) <= 0.1 * total, (missing[:10], total)


class Attention(torch.nn.Module):
    """As attention layers are written: one product for query, key and value, taken apart by `take`."""

    def __init__(self, take):
        super().__init__()
        self.take, self.product, self.out = take, torch.nn.Linear(128, 384), torch.nn.Linear(128, 128)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.take(self.product(x).view(n, length, 3, 4, 32).permute(2, 0, 3, 1, 4))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


@pytest.mark.parametrize("take", (lambda t: t.unbind(0), lambda t: (s.squeeze(0) for s in t.chunk(3)), lambda t: (t[0], t[1], t[2])))
def test_lists_of_views_are_what_they_are_views_of(tmp_path, take):
    torch.jit.trace(Attention(take), torch.randn(2, 64, 128)).save(str(tmp_path / "model.pt"))
    report, text = rewritten(tmp_path, None)
    assert {s["op"] for s in report["stays"]} == {"tsmem::linear", "tsmem::scaled_dot_product_attention"}, text


@pytest.mark.parametrize("length,stays", ((42, False), (43, True)))
def test_attention_of_few_keys_does_not_stay(tmp_path, length, stays):
    """Of exported programs, whose bytes are known without an input: a third of a key for each of 128 features."""
    program = torch.export.export(Attention(lambda t: t.unbind(0)), (torch.randn(8, length, 128),))
    torch.export.save(program, str(tmp_path / "model.pt2"))
    done = run("rewrite", tmp_path / "model.pt2", "-o", tmp_path / "out.pt2", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    kept = {s["op"] for s in json.loads((tmp_path / "report.json").read_text())["stays"] if (s["bytes"] or 0) > 4096}
    assert ("tsmem::scaled_dot_product_attention" in kept) == stays, done.stdout
