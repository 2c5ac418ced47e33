"""Bad input ends in one sentence and the right exit code, and nothing is lost."""
import os
import pickle
import resource
import struct
import subprocess
import zipfile

import pytest
import torch

from command_line import BINARY, SPEC, Net, fails, run, save_net


@pytest.fixture
def model(tmp_path):
    return save_net(tmp_path / "net.pt")


def patched(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def bad_files(tmp_path, model):
    """Name -> (how to make it, what the sentence says)."""
    whole = model.read_bytes()
    eager = Net()
    directory = whole.index(b"PK\x01\x02")

    def state_dict(path):
        torch.save(eager.state_dict(), path)

    def old_state_dict(path):
        torch.save(eager.state_dict(), path, _use_new_zipfile_serialization=False)

    def pickled_module(path):
        torch.save(eager, path)

    def exported(path):
        torch.export.save(torch.export.export(Net().eval(), (torch.rand(2, 4, 8, 8),)), path)

    def other_zip(path):
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("a/readme.txt", "hello")

    def changed_pickle(path, payload):
        with zipfile.ZipFile(model) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                new.writestr(name, payload if name.endswith("/constants.pkl") else old.read(name))

    return {
        "text": (lambda p: p.write_text("hello " * 100), "isn't a zip"),
        "empty": (lambda p: p.touch(), "empty"),
        "truncated": (lambda p: p.write_bytes(whole[: len(whole) // 2]), "missing"),
        "one byte short": (lambda p: p.write_bytes(whole[:-1]), "missing"),
        "directory": (lambda p: p.mkdir(), "directory"),
        "nowhere": (lambda p: None, "No such file"),
        "state_dict": (state_dict, ["state_dict", "torch.jit.script"]),
        "old state_dict": (old_state_dict, ["state_dict", "torch.jit.script"]),
        "pickled module": (pickled_module, ["pickled model", "torch.jit.script"]),
        "torch.export": (exported, ["torch.export", "torch.jit.script"]),
        "other zip": (other_zip, "not a TorchScript file"),
        # Sizes and places that do not fit the file.
        "huge record": (lambda p: p.write_bytes(patched(whole, directory + 20, b"\xf0\xff\xff\x7f" * 2)), "damaged"),
        "record outside": (lambda p: p.write_bytes(patched(whole, directory + 42, b"\xf0\xff\xff\x7f")), "damaged"),
        "long name": (lambda p: p.write_bytes(patched(whole, directory + 28, b"\xff\xff")), "damaged"),
        "bad signature": (lambda p: p.write_bytes(patched(whole, directory, b"XXXX")), "damaged"),
        # A pickle that asks for 64 GiB of memory by one opcode; one that takes from an empty stack; one that is cut off.
        "huge memo": (lambda p: changed_pickle(p, b"\x80\x02)r\xf0\xff\xff\xff."), "too large"),
        "huge string": (lambda p: changed_pickle(p, b"\x80\x02\x8d" + struct.pack("<Q", 1 << 40) + b"x."), "too early"),
        "stack underflow": (lambda p: changed_pickle(p, b"\x80\x02\x87."), "inconsistent"),
        "no stop": (lambda p: changed_pickle(p, b"\x80\x02)"), "too early"),
        "wrong pickle": (lambda p: changed_pickle(p, pickle.dumps({"a": 1}, protocol=2)), "can't load"),
        "wrong code": (wrong_code(model), "can't load"),
    }


def wrong_code(model):
    def make(path):
        with zipfile.ZipFile(model) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                data = old.read(name)
                new.writestr(name, data.replace(b"return", b"return return") if name.endswith(".py") else data)

    return make


BAD = [
    "text", "empty", "truncated", "one byte short", "directory", "nowhere", "state_dict", "old state_dict", "pickled module", "torch.export",
    "other zip", "huge record", "record outside", "long name", "bad signature", "huge memo", "huge string", "stack underflow", "no stop",
    "wrong pickle", "wrong code",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_model_files(tmp_path, model, name):
    path, out = tmp_path / "bad.pt", tmp_path / "out.pt"
    make, says = bad_files(tmp_path, model)[name]
    make(path)
    fails(3, "rewrite", path, "-o", out, says=says)
    assert not out.exists() and sorted(p.name for p in tmp_path.iterdir() if p != path) == ["net.pt"]


def test_every_command_reads_models_with_the_same_care(tmp_path, model):
    bad = tmp_path / "bad.pt"
    bad.write_text("hello")
    fails(3, "diff", model, bad, says="bad.pt")
    fails(3, "diff", bad, model, says="bad.pt")
    fails(3, "inspect", bad, says="bad.pt")
    fails(3, "profile", bad, "--input", SPEC, says="bad.pt")
    fails(3, "verify", model, bad, "--input", SPEC, says="bad.pt")
    fails(3, "plan", bad, "--input", SPEC, says="bad.pt")


def test_unreadable_model(tmp_path, model):
    if os.geteuid() == 0:  # root may read everything: another user reads it
        model.chmod(0o600)
        for parent in [tmp_path, *tmp_path.parents]:
            if parent.stat().st_mode & 0o001 == 0:
                parent.chmod(parent.stat().st_mode | 0o011)
        as_nobody = {"user": 65534}
    else:
        model.chmod(0)
        as_nobody = {}
    fails(3, "inspect", model, says="Permission denied", **as_nobody)


KEPT = []


def test_unknown_custom_op(tmp_path):
    with torch.library._scoped_library("tsmem_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x, "CPU")

        class Custom(torch.nn.Module):
            def forward(self, x):
                return torch.ops.tsmem_test.mystery(x)

        torch.jit.script(Custom()).save(tmp_path / "custom.pt")
        # torch.jit knows operators by their id(), which must not be used again for something else.
        KEPT.append(torch.ops.tsmem_test.mystery)
    fails(3, "inspect", tmp_path / "custom.pt", says=["tsmem_test::mystery", "--ops"])


def test_bad_op_library(tmp_path, model):
    fails(3, "inspect", model, "--ops", tmp_path / "nowhere.so", says="no op library")
    (tmp_path / "text.so").write_text("hello")
    fails(3, "inspect", model, "--ops", tmp_path / "text.so", says="text.so")


# Outputs.


def unchanged(path, *arguments, code, says, **options):
    before = path.read_bytes(), path.stat().st_mtime_ns
    fails(code, *arguments, says=says, **options)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_existing_output_is_refused(tmp_path, model):
    out = tmp_path / "out.pt"
    out.write_text("precious")
    unchanged(out, "rewrite", model, "-o", out, code=2, says=["exists", "--force"])
    assert run("rewrite", model, "-o", out, "--force").returncode == 0


@pytest.mark.parametrize("how", ["name", "path", "symlink", "hardlink"])
def test_the_input_is_never_touched(tmp_path, model, how):
    out = tmp_path / "same.pt"
    if how == "symlink":
        out.symlink_to(model)
    elif how == "hardlink":
        os.link(model, out)
    else:
        out = model if how == "name" else tmp_path / "." / ".." / tmp_path.name / "net.pt"
    unchanged(model, "rewrite", model, "-o", out, "--force", code=2, says="input")
    assert run("inspect", model).returncode == 0


def test_report_does_not_replace_a_model(tmp_path, model):
    unchanged(model, "rewrite", model, "-o", tmp_path / "out.pt", "--json", model, code=2, says="--json")
    unchanged(model, "inspect", model, "--json", model, code=2, says="--json")
    fails(2, "rewrite", model, "-o", tmp_path / "out.pt", "--json", tmp_path / "out.pt", says="--json")


@pytest.mark.parametrize("where", ["missing/out.pt", "", "net.pt/out.pt"])
def test_output_that_cannot_be_made(tmp_path, model, where):
    fails(3, "rewrite", model, "-o", f"{tmp_path}/{where}", "--force", says="Can't write")
    assert run("inspect", model).returncode == 0


def test_devices_are_not_replaced(model):
    fails(3, "rewrite", model, "-o", "/dev/null", "--force", says="not a regular file")
    assert not os.path.isfile("/dev/null")


def test_output_without_permission(tmp_path, model):
    closed = tmp_path / "closed"
    closed.mkdir()
    options = {}
    if os.geteuid() == 0:
        for parent in [tmp_path, *tmp_path.parents]:
            if parent.stat().st_mode & 0o001 == 0:
                parent.chmod(parent.stat().st_mode | 0o011)
        model.chmod(0o644)
        closed.chmod(0o755)
        options = {"user": 65534}
    else:
        closed.chmod(0o555)
    fails(3, "rewrite", model, "-o", closed / "out.pt", says="Permission denied", **options)
    assert list(closed.iterdir()) == []


def big_model(path):
    torch.jit.script(torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.ReLU())).save(path)
    return path


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("limit", [1, 4096, 100_000, 1_990_000])
def test_a_full_disk_loses_nothing(tmp_path, limit, exists):
    """A limit on file sizes stands for the full disk: writes stop short in the same way, in every part of the file."""
    model, out = big_model(tmp_path / "big.pt"), tmp_path / "out.pt"
    if exists:
        out.write_text("precious")
    lower = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    fails(3, "rewrite", model, "-o", out, "--force", says="Can't write", preexec_fn=lower)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.pt"] + ["out.pt"] * exists
    assert not exists or out.read_text() == "precious"


def test_a_full_file_system(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True)
    if mounted.returncode != 0:  # not root: the limit above is the same to the program
        return
    try:
        model = big_model(tmp_path / "big.pt")
        fails(3, "rewrite", model, "-o", small / "out.pt", says="No space left")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_full_standard_output(model):
    with open("/dev/full", "w") as full:
        done = subprocess.run([BINARY, "inspect", str(model)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3 and "No space left" in done.stderr and len(done.stderr.splitlines()) == 1


# Usage.


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["rewrit", "m.pt"], "did you mean 'rewrite'?"),
        (["dif", "a.pt", "b.pt"], "did you mean 'diff'?"),
        (["xyzzy"], "no command 'xyzzy'"),
        ([], "rewrite"),
        (["rewrite"], "MODEL.pt"),
        (["rewrite", "m.pt", "--dryrun"], "did you mean '--dry-run'?"),
        (["rewrite", "m.pt", "--forze", "-o", "x.pt"], "did you mean '--force'?"),
        (["diff", "a.pt", "b.pt", "--stats"], "did you mean '--stat'?"),
        (["diff", "a.pt", "b.pt", "c.pt"], "c.pt"),
        (["diff", "a.pt"], "B.pt"),
        (["inspect", "m.pt", "--seed", "many"], "--seed"),
        (["inspect", "m.pt", "--color", "blue"], "--color"),
        (["rewrite", "m.pt", "-o"], "needs a value"),
        (["rewrite", "m.pt", "--level", "best", "-o", "x.pt"], "--level"),
        (["completion", "tcsh"], "bash"),
        (["patterns", "bn-atc"], "did you mean 'bn-act'?"),
    ],
)
def test_wrong_usage(arguments, says):
    fails(2, *arguments, says=says)


def test_no_output_named(model):
    fails(2, "rewrite", model, says=["-o", "--dry-run"])


@pytest.mark.parametrize(
    "options, says",
    [
        (["--only", "bn-atc"], "bn-act"),
        (["--skip", "nothing-like-it"], "nothing-like-it"),
        (["--method", "featuers"], "did you mean 'features'?"),
        (["--module", "layer9"], "layer9"),
        (["--freeze", "layer9.*"], "layer9.*"),
        (["--level", "ops", "--budget", "1GiB"], "exclude each other"),
        (["--level", "plan"], "--budget"),
        (["--budget", "1GiB"], "--input"),
        (["--level", "ops", "--checkpoint", "block1"], "exclude each other"),
        (["--restore", "--only", "bn-act"], "exclude each other"),
    ],
)
def test_wrong_rewrite_options(tmp_path, model, options, says):
    fails(2, "rewrite", model, "-o", tmp_path / "out.pt", *options, says=says)
    assert not (tmp_path / "out.pt").exists()


def test_methods_that_do_not_exist(model):
    fails(2, "diff", model, model, "--method", "forwrad", says="did you mean 'forward'?")
    fails(2, "inspect", model, "--method", "featurs", says="did you mean 'features'?")


def test_restore_of_what_was_not_rewritten(tmp_path, model):
    fails(3, "rewrite", model, "-o", tmp_path / "out.pt", "--restore", says="nothing to restore")


@pytest.mark.parametrize(
    "specs, code",
    [
        (["2x4x8xbanana"], 2),
        (["2x4x8x8:f99"], 2),
        (["-1x4x8x8"], 2),
        (["@nowhere.pt"], 3),
        ([SPEC, SPEC], 3),  # too many arguments
        (["3:int"], 3),  # of the wrong type
        (["2x5x8x8"], 3),  # the model raises: channels
        (["2x4x8x8:i64[0,2)"], 3),  # and for integers
    ],
)
def test_wrong_inputs(tmp_path, model, specs, code):
    options = [word for spec in specs for word in ("--input=" + spec,)]
    fails(code, "rewrite", model, "-o", tmp_path / "out.pt", *options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.pt"]
