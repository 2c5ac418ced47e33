"""Bad input ends in one sentence and the right exit code, and nothing is lost."""
import fcntl
import os
import pathlib
import pickle
import pickletools
import resource
import signal
import struct
import subprocess
import sys
import time
import zipfile

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "hostile"))
import mutate
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
        "other zip": (other_zip, "not a TorchScript file"),
        # Sizes and places that do not fit the file.
        "huge record": (lambda p: p.write_bytes(patched(whole, directory + 20, b"\xf0\xff\xff\x7f" * 2)), "damaged"),
        "record outside": (lambda p: p.write_bytes(patched(whole, directory + 42, b"\xf0\xff\xff\x7f")), "damaged"),
        "long name": (lambda p: p.write_bytes(patched(whole, directory + 28, b"\xff\xff")), "damaged"),
        "bad signature": (lambda p: p.write_bytes(patched(whole, directory, b"XXXX")), "damaged"),
        # A pickle that asks for 64 GiB of memory by one opcode; one that takes from an empty stack; one that is cut off.
        "huge memo": (lambda p: changed_pickle(p, b"\x80\x02)r\xf0\xff\xff\xff."), "too large"),
        "huge string": (lambda p: changed_pickle(p, b"\x80\x02\x8d" + struct.pack("<Q", 1 << 40) + b"x."), "too early"),
        "unknown opcode": (lambda p: changed_pickle(p, b"\x80\x02)2."), "opcode"),
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
    "text", "empty", "truncated", "one byte short", "directory", "nowhere", "state_dict", "old state_dict", "pickled module",
    "other zip", "huge record", "record outside", "long name", "bad signature", "huge memo", "huge string", "unknown opcode", "stack underflow", "no stop",
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


# Damaged and hostile records. What `make hostile` finds by chance is here by name.


def with_record(model, path, ending, change):
    """A copy of the model whose first record of that ending is changed; checksums fit."""
    contents = mutate.records(model)
    name = next(n for n in contents if n.endswith(ending))
    contents[name] = change(contents[name])
    path.write_bytes(mutate.archive(contents))
    return path


def replaced(old, new):
    def change(data):
        assert old in data
        return data.replace(old, new, 1)

    return change


MINUS_ONE = b"J" + struct.pack("<i", -1)
SIZES, STRIDES = b"(K\x04K\x04K\x03K\x03t", b"(K$K\tK\x03K\x01t"  # of a convolution's weight

BEYOND = {
    "record cut": ("/data/0", lambda d: d[: len(d) // 2], ["record '0'", "take"]),
    "no record": ("/data.pkl", replaced(b"X\x01\x00\x00\x000q", b"X\x01\x00\x00\x00xq"), ["record 'x'", "missing"]),
    "other dtype": ("/data.pkl", replaced(b"torch\nFloatStorage", b"torch\nDoubleStorage"), ["record '0'", "take"]),
    "more elements": ("/data.pkl", replaced(b"K\x90tQ", b"M\xff\xfftQ"), ["record '0'", "take"]),
    "elements without number": ("/data.pkl", replaced(b"K\x90tQ", mutate.int_opcode(2**62) + b"tQ"), "impossible number"),
    "fewer elements": ("/data.pkl", replaced(b"K\x90tQ", b"K\x8ftQ"), "beyond"),
    "no elements": ("/data.pkl", replaced(b"K\x90tQ", b"K\x00tQ"), "beyond"),
    "size": ("/data.pkl", replaced(SIZES, SIZES.replace(b"(K\x04", b"(K\x05")), "beyond"),
    "stride": ("/data.pkl", replaced(STRIDES, STRIDES.replace(b"(K$", b"(K%")), "beyond"),
    "offset": ("/data.pkl", replaced(b"K\x00" + SIZES, b"K\x01" + SIZES), "beyond"),
    "negative offset": ("/data.pkl", replaced(b"K\x00" + SIZES, MINUS_ONE + SIZES), "before its record"),
    "negative size": ("/data.pkl", replaced(SIZES, SIZES.replace(b"(K\x04", b"(" + MINUS_ONE)), "negative"),
    "negative stride": ("/data.pkl", replaced(STRIDES, STRIDES.replace(b"(K$", b"(" + MINUS_ONE)), "negative"),
    "size beyond numbers": ("/data.pkl", replaced(SIZES, b"(" + mutate.int_opcode(2**62) + SIZES[3:]), "larger than any memory"),
    "dimension without stride": ("/data.pkl", replaced(STRIDES, b"(K$K\tK\x03t"), "different numbers"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_tensors_beyond_their_records(tmp_path, model, name):
    ending, change, says = BEYOND[name]
    bad = with_record(model, tmp_path / "bad.pt", ending, change)
    for arguments in (["rewrite", bad, "-o", tmp_path / "out.pt"], ["profile", bad, "--input", SPEC]):
        assert "damaged" in fails(3, *arguments, says=says)


def test_tensors_beyond_their_records_in_inputs(tmp_path, model):
    torch.save((torch.rand(2, 4, 8, 8),), tmp_path / "inputs.pt")
    bad = with_record(tmp_path / "inputs.pt", tmp_path / "bad.pt", "/data/0", lambda d: d[:-4])
    fails(3, "profile", model, "--inputs", f"@{bad}", says=["damaged", "record '0'"])
    fails(3, "profile", model, "--input", f"@{bad}", says=["damaged", "record '0'"])


@pytest.mark.parametrize("ending", ["/data/0", "/data.pkl", ".py", ".debug_pkl", "/version"])
def test_every_record_has_its_checksum_checked(tmp_path, model, ending):
    bad, whole = tmp_path / "bad.pt", model.read_bytes()
    with zipfile.ZipFile(model) as z:
        info = next(i for i in z.infolist() if i.filename.endswith(ending))
    header = whole[info.header_offset :][:30]
    begin = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
    bad.write_bytes(patched(whole, begin + info.compress_size // 2, bytes([whole[begin + info.compress_size // 2] ^ 1])))
    name = info.filename.split("/", 1)[1]
    for arguments in (["rewrite", bad, "-o", tmp_path / "out.pt"], ["inspect", bad], ["diff", model, bad], ["verify", bad, model, "--input", SPEC]):
        fails(3, *arguments, says=["damaged", name])


def test_inputs_without_checksums(tmp_path, model):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save((torch.rand(2, 4, 8, 8),), tmp_path / "inputs.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    done = run("rewrite", model, "-o", tmp_path / "out.pt", "--inputs", f"@{tmp_path}/inputs.pt")
    assert done.returncode == 0, done.stderr


def in_forward(statement):
    return lambda code: code.replace(b"    head = ", b"    " + statement + b"\n    head = ", 1)


DEEP = {
    "parentheses": (".py", in_forward(b"z = " + b"(" * 10_000 + b"1" + b")" * 10_000)),
    "calls": (".py", in_forward(b"z = " + b"torch.neg(" * 10_000 + b"x" + b")" * 10_000)),
    "lists": (".py", in_forward(b"z = " + b"[" * 20_000 + b"1" + b"]" * 20_000)),
    "minuses": (".py", in_forward(b"z = " + b"-" * 100_000 + b"1")),
    "sums": (".py", in_forward(b"z = 1" + b" + 1" * 100_000)),
    "blocks": (".py", in_forward(b"\n".join(b"    " + b" " * i + b"if True:" for i in range(2000)).lstrip() + b"\n" + b" " * 2004 + b"z = 1")),
    "pickle": ("/data.pkl", lambda d: d[:2] + b"N" + b"\x85" * 200_000 + b"0" + d[2:]),
    "pickled lists": ("/data.pkl", lambda d: d[:2] + b"]" * 200_000 + b"a" * 199_999 + d[2:]),
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting(tmp_path, model, name):
    bad = with_record(model, tmp_path / "bad.pt", *DEEP[name])
    fails(3, "rewrite", bad, "-o", tmp_path / "out.pt", says=["nests more than 1000"])
    fails(3, "inspect", bad, says=["nests more than 1000"])


def test_long_flat_code_is_not_deep(tmp_path, model):
    """What tracing a large model gives."""
    flat = b"\n".join(b"    z%d = torch.neg(x)" % i for i in range(3000)).lstrip() + b"\n    zs = [" + b"1, " * 20_000 + b"1]"
    good = with_record(model, tmp_path / "good.pt", ".py", in_forward(flat))
    assert run("inspect", good).returncode == 0


def test_a_value_that_contains_itself(tmp_path, model):
    bad = with_record(model, tmp_path / "bad.pt", "/data.pkl", lambda d: d[:2] + b"]q\xfeh\xfea" + d[2:])
    fails(3, "inspect", bad, says="contains itself")


class Quantized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 1)
        self.register_buffer("table", torch.quantize_per_channel(torch.rand(4, 3), torch.full((4,), 0.1), torch.tensor([5, 6, 7, 8]), 0, torch.qint8))

    def forward(self, x):
        return self.conv(x)


def test_quantized_tensors_without_values(tmp_path):
    """A zero point beyond the dtype, and a quantized tensor that has no scale at all: LibTorch loads both."""
    good = tmp_path / "good.pt"
    torch.jit.script(Quantized()).save(str(good))
    contents = mutate.records(good)
    points = next(name for name, data in contents.items() if data[:32] == struct.pack("<4q", 5, 6, 7, 8))
    bad = with_record(good, tmp_path / "zero_point.pt", points, lambda d: struct.pack("<4q", 5, 6, 7, 1 << 55))
    unscaled = with_record(good, tmp_path / "unscaled.pt", "/data.pkl", lambda d: d.replace(b"FloatStorage", b"QInt8Storage", 1))
    for file, names in ((bad, ["'table'", "damaged"]), (unscaled, ["quantize"])):
        fails(3, "inspect", file, says=names)
        fails(3, "rewrite", file, "-o", tmp_path / "out.pt", says=names)
        fails(3, "verify", good, file, "--input", SPEC, says=names)
    assert run("verify", good, good, "--input", SPEC, "--no-measure").returncode == 0


def test_a_chain_of_twenty_thousand_operators(tmp_path, model):
    """Quadratic code takes minutes for it."""
    n = 20_000
    chain = b"\n".join([b"z0 = torch.neg(x)"] + [b"    z%d = torch.%s(z%d)" % (i + 1, [b"relu", b"neg", b"sigmoid"][i % 3], i) for i in range(n)])
    folder = tmp_path / "models"
    folder.mkdir()
    long = with_record(model, folder / "long.pt", ".py", in_forward(chain))
    other = with_record(model, folder / "other.pt", ".py", in_forward(chain.replace(b"sigmoid", b"tanh")))
    for arguments in (["inspect", long], ["rewrite", long, "-o", folder / "out.pt"], ["diff", long, other], ["diff", long, long], ["diff", long, other, "--format", "html"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode in (0, 1), done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60, arguments  # not hours: what grows with the square of the length


def test_a_chain_of_twenty_thousand_operators_that_are_used(tmp_path, model):
    """LibTorch drops the chain above, which nothing uses; this one runs through every pass of a rewrite."""
    chain = b"\n".join([b"x = torch.neg(x)"] + [b"    x = torch.%s(x)" % [b"relu", b"neg", b"sigmoid"][i % 3] for i in range(20_000)])
    long = with_record(model, tmp_path / "long.pt", ".py", in_forward(chain))
    for arguments in (["inspect", long], ["rewrite", long, "-o", tmp_path / "out.pt"], ["diff", long, long]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60, arguments  # not hours: what grows with the square of the length


def test_garbage_for_places_in_the_source(tmp_path, model):
    bad = with_record(model, tmp_path / "bad.pt", ".debug_pkl", lambda d: b"garbage")
    fails(3, "rewrite", bad, "-o", tmp_path / "out.pt", says=["damaged", "debug_pkl"])


def without_ends_of_lines(data):
    """Places in the source whose lines have lost their ends, but for an empty one behind them, at which PyTorch's printer fails an assertion."""
    out, begin = [], 0
    for opcode, argument, at in [*pickletools.genops(data), (None, None, len(data))]:
        if begin < at and previous.name == "BINUNICODE" and text.endswith("\n"):
            line = text.rstrip("\n").encode()
            out.append(b"X" + struct.pack("<I", len(line)) + line)
        else:
            out.append(data[begin:at])
        previous, text, begin = opcode, argument, at
    return b"".join(out)


def test_places_in_a_source_without_ends_of_lines(tmp_path, model):
    bad = with_record(model, tmp_path / "bad.pt", ".debug_pkl", without_ends_of_lines)
    fails(3, "rewrite", bad, "-o", tmp_path / "out.pt", says=["damaged", "debug_pkl"])


def test_sparse_tensor_whose_indices_reach_beyond_it(tmp_path):
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sparse", torch.eye(3).to_sparse())

        def forward(self, x):
            return torch.relu(x) + self.sparse.to_dense()

    torch.jit.script(Sparse()).save(str(tmp_path / "good.pt"))
    contents = mutate.records(tmp_path / "good.pt")
    name = next(n for n in contents if "/data/" in n and len(contents[n]) == 48)  # the indices
    contents[name] = struct.pack("<6q", 0, 1, 2**40, 0, 1, 2)
    (tmp_path / "bad.pt").write_bytes(mutate.archive(contents))
    assert run("rewrite", tmp_path / "good.pt", "-o", tmp_path / "good-out.pt").returncode == 0
    fails(3, "rewrite", tmp_path / "bad.pt", "-o", tmp_path / "out.pt", says=["damaged", "sparse"])


def test_a_record_that_grows_a_thousandfold(tmp_path, model):
    bad = with_record(model, tmp_path / "bad.pt", ".py", lambda d: d + b"\n" * (256 << 20))
    assert bad.stat().st_size < 1 << 20
    began = time.monotonic()
    fails(3, "rewrite", bad, "-o", tmp_path / "out.pt", says=["damaged", "256 MiB"])
    assert time.monotonic() - began < 20


def test_a_record_that_is_there_twice(tmp_path, model):
    contents = mutate.records(model)
    name = next(n for n in contents if n.endswith("/data/0"))
    with pytest.warns(UserWarning):
        (tmp_path / "bad.pt").write_bytes(mutate.archive([*contents.items(), (name, contents[name])]))
    fails(3, "inspect", tmp_path / "bad.pt", says=["damaged", "two records"])


def test_a_crash_while_reading_is_a_sentence(tmp_path, model):
    """A chain of functions, each calling the next, is read by recursion and can't be seen to be deep."""
    n = 100_000
    code = b"".join(b"def f%d(x: Tensor) -> Tensor:\n  return __torch__.f%d(x, )\n" % (i, i + 1) for i in range(n)) + b"def f%d(x: Tensor) -> Tensor:\n  return x\n" % n
    with_record(model, tmp_path / "bad.pt", ".py", lambda d: in_forward(b"z = __torch__.f0(x, )")(d))
    contents = mutate.records(tmp_path / "bad.pt")
    folder = next(iter(contents)).split("/")[0]
    contents[f"{folder}/code/__torch__.py"] = code
    (tmp_path / "bad.pt").write_bytes(mutate.archive(contents))
    fails(3, "inspect", tmp_path / "bad.pt", says="bad.pt")


def test_a_checkpoint_that_calls_itself(tmp_path, model):
    wrapped = tmp_path / "wrapped.pt"
    assert run("rewrite", model, "-o", wrapped, "--checkpoint", "block1").returncode == 0
    bad = with_record(wrapped, tmp_path / "bad.pt", "/command_line.py", replaced(b"ops.tsmem.checkpoint(block1, ", b"ops.tsmem.checkpoint(self, "))
    assert "without an end" in fails(3, "profile", bad, "--input", SPEC, says="calls itself")


class Reserved(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self._tsmem_m = torch.nn.ReLU()

    def forward(self, x):
        return self._tsmem_m(x)


class OtherSignature(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

    @torch.jit.export
    def _tsmem_original_forward(self, x, y: int):
        return x


@pytest.mark.parametrize("make, says", [(Reserved, ["_tsmem_m", "reserved"]), (OtherSignature, ["_tsmem_original_forward", "signature"])])
def test_reserved_names(tmp_path, make, says):
    torch.jit.script(make()).save(tmp_path / "model.pt")
    fails(3, "rewrite", tmp_path / "model.pt", "-o", tmp_path / "out.pt", says=says)
    fails(3, "rewrite", tmp_path / "model.pt", "-o", tmp_path / "out.pt", "--restore", says=says)
    fails(3, "inspect", tmp_path / "model.pt", says=says)


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


def test_what_a_killed_tool_left_goes_at_the_next_time(tmp_path, model):
    out, mine = tmp_path / "out.pt", tmp_path / "out.pt.tmp-tsmem-0123456789abcdef"
    other, alike = tmp_path / "other.pt.tmp-tsmem-0123456789abcdef", tmp_path / "out.pt.tmp1"
    live = tmp_path / "out.pt.tmp-tsmem-fedcba9876543210"
    for file in (mine, other, alike, live):
        file.write_text("left")
    with open(live) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run("rewrite", model, "-o", out).returncode == 0
        assert not mine.exists() and other.exists() and alike.exists() and live.exists()
    assert run("rewrite", model, "-o", out, "--force").returncode == 0
    assert not live.exists()


def test_a_killed_tool_loses_nothing(tmp_path):
    model, out = tmp_path / "big.pt", tmp_path / "out.pt"
    torch.jit.script(torch.nn.Linear(5000, 5000)).save(model)
    process = subprocess.Popen([BINARY, "rewrite", model, "-o", out])
    while process.poll() is None and not list(tmp_path.glob("out.pt.tmp*")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists() and len(list(tmp_path.glob("out.pt.tmp*"))) == 1
    assert run("rewrite", model, "-o", out).returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.pt", "out.pt"]


def test_a_replaced_file_keeps_its_mode(tmp_path, model):
    out = tmp_path / "out.pt"
    out.write_text("private")
    out.chmod(0o600)
    assert run("rewrite", model, "-o", out, "--force").returncode == 0
    assert out.stat().st_mode & 0o777 == 0o600
    new = tmp_path / "new.pt"
    assert run("rewrite", model, "-o", new, preexec_fn=lambda: os.umask(0o027)).returncode == 0
    assert new.stat().st_mode & 0o777 == 0o640


def test_a_link_to_nothing_is_followed(tmp_path, model):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.pt", tmp_path / "there" / "out.pt"
    link.symlink_to("there/out.pt")
    fails(2, "rewrite", model, "-o", link, says="exists")
    assert run("rewrite", model, "-o", link, "--force").returncode == 0
    assert link.is_symlink() and target.is_file()
    nowhere = tmp_path / "nowhere.pt"
    nowhere.symlink_to("missing/out.pt")
    fails(3, "rewrite", model, "-o", nowhere, "--force", says="no directory")
    circle = tmp_path / "circle.pt"
    circle.symlink_to("circle.pt")
    fails(3, "rewrite", model, "-o", circle, "--force", says="Can't write")
    assert nowhere.is_symlink() and circle.is_symlink()


@pytest.mark.parametrize("length", [200, 228, 229, 243, 255])
def test_long_names(tmp_path, model, length):
    out = tmp_path / ("\u00e4" * 50 + "x" * (length - 103) + ".pt")
    assert len(os.fsencode(out.name)) == length
    assert run("rewrite", model, "-o", out).returncode == 0
    assert run("rewrite", model, "-o", out, "--force").returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["net.pt", out.name])


def test_a_name_too_long(tmp_path, model):
    fails(3, "rewrite", model, "-o", tmp_path / ("x" * 256), says="too long")


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
        (["inspect", "m.pt", "--seed", str(2**64)], "--seed"),
        (["inspect", "m.pt", "--seed", "-1"], "--seed"),
        (["inspect", "m.pt", "--seed", "1e3"], "--seed"),
        (["profile", "m.pt", "--threads", "1000000"], "1024"),
        (["profile", "m.pt", "--threads", "0"], "--threads"),
        (["profile", "m.pt", "--steps", str(2**32 + 5)], "--steps"),
        (["profile", "m.pt", "--depth", str(2**31)], "--depth"),
        (["verify", "m.pt", "m.pt", "--calls", "nan"], "--calls"),
        (["plan", "m.pt", "--points", "1e1"], "--points"),
        (["plan", "m.pt", "--solve-seconds", "nan"], "--solve-seconds"),
        (["plan", "m.pt", "--solve-seconds", "inf"], "--solve-seconds"),
        (["plan", "m.pt", "--solve-seconds", "0"], "--solve-seconds"),
        (["rewrite", "m.pt", "-o", "x.pt", "--fit", "nan", "--input", "3"], "--fit"),
        (["rewrite", "m.pt", "-o", "x.pt", "--budget", "inf", "--input", "3"], "--budget"),
        (["rewrite", "m.pt", "-o", "x.pt", "--budget", "nan%", "--input", "3"], "--budget"),
        (["rewrite", "m.pt", "-o", "x.pt", "--batch-sizes", "9999999999", "--budget", "1GiB", "--input", "3"], "--batch-sizes"),
        (["rewrite", "m.pt", "-o", "x.pt", "--optimizer-states", str(2**40)], "--optimizer-states"),
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
