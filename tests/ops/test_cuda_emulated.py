"""The CUDA kernels on an emulated device (tests/cuda): every raw op against the CPU's, which the other tests hold against aten.

TSMEM_EMULATED_CUDA=1 in the environment puts them in place of the CPU's kernels, and the tests of the public ops then run on them.
"""

import itertools
import os
import pathlib
import subprocess
import sys

import conftest
import pytest
import torch
from op_checks import DTYPES, channels_last
from test_norm import ACTS, ONE_BIT
from torch._prims_common import suggest_memory_format

KINDS = ["identity", "relu", "hardtanh", "threshold", "leaky_relu", "hardsigmoid", "silu", "hardswish", "gelu", "gelu_tanh",
         "sigmoid", "tanh", "elu", "softplus", "mish", "hardsigmoid_eager"]  # fmt: skip
# One value a row, one channel, whole octets and not, odd planes, more channels than a block has, one image.
SHAPES = [(4, 16, 7, 7), (3, 5, 6, 5), (2, 33, 3, 1), (70, 8), (2, 1, 9, 13), (2, 3, 31), (3, 24, 1, 1), (1, 4, 2, 19, 5), (2, 70, 2, 2), (3, 1000),
          (5, 24, 8, 6), (2, 264, 4, 4)]


@pytest.fixture(scope="module")
def emulated(ops):
    library = conftest.emulated_library()
    assert library.exists(), f"{library} is not built: build with TSMEM_TESTS=ON"
    torch.ops.load_library(str(library))
    return torch.ops.tsmem_emulated


@pytest.fixture(scope="module")
def raw(ops):
    return torch.ops.tsmem


def act_arguments(name):
    arguments = ACTS[name][0]
    return [KINDS.index(name), *arguments, *[0.0] * (3 - len(arguments))]


def draw(shape, dtype, last=False, offset=0, seed=0):
    """Numbers around 1 in a layout, at a storage offset."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    x = channels_last(x.to(dtype)) if last else x.to(dtype)
    if not offset:
        return x
    memory = torch.empty(x.numel() + offset, dtype=dtype)
    return memory[offset:].as_strided(x.shape, x.stride()).copy_(x)


def close(ours, theirs, dtype, slack=1.0):
    """The same numbers to rounding; None and undefined alike; layouts and dtypes equal."""
    ours, theirs = (list(t) if isinstance(t, (tuple, list)) else [t] for t in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        if a.dtype.is_floating_point:
            eps = torch.finfo(dtype).eps
            scale = b[b.isfinite()].double().abs().max().item() if b.isfinite().any() else 1.0
            torch.testing.assert_close(a.double(), b.double(), rtol=8 * eps, atol=8 * eps * max(scale, 1e-3) * slack, equal_nan=True)
        else:
            assert torch.equal(a, b)


def parameters(c, dtype, seed=5):
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(c, generator=gen) + 0.5).to(dtype), torch.randn(c, generator=gen).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE_BIT)
def test_masks(emulated, raw, name, dtype):
    kind, a, b, _ = act_arguments(name)
    # The gradient at NaN is aten's on that device: CUDA's hardtanh lets it pass, the CPU's does not.
    borders = torch.tensor([0.5 if name == "hardtanh" else float("nan"), float("inf"), -float("inf"), 0.0, 3.0, -3.0, a, b, -a], dtype=dtype)
    for x in (draw((3, 5, 7), dtype), draw((2, 8, 3, 3), dtype, last=True), draw((33,), dtype, offset=3), draw((1,), dtype),
              draw((0, 3), dtype), borders, draw((6, 4), dtype).t()):  # fmt: skip
        y, mask = emulated._act_mask(x, kind, a, b)
        expected, bits = raw._act_mask(x, kind, a, b)
        close(y, expected, dtype)
        assert mask.shape == bits.shape
        grad = draw(x.shape, dtype, seed=1)
        grad.view(-1)[:1] = float("nan")
        close(emulated._act_mask_backward(grad, mask, kind, a, b, y.stride()),
              raw._act_mask_backward(grad, bits, kind, a, b, y.stride()), dtype)  # fmt: skip


def forward_args(shape, dtype, name, training, add, last, offset, low_parameters=True):
    x = draw(shape, dtype, last, offset)
    p = dtype if low_parameters else torch.float32
    weight, bias = parameters(shape[1], p)
    running = [torch.zeros(shape[1], dtype=p), torch.ones(shape[1], dtype=p)]
    z = draw(shape, dtype, last, offset, seed=2) if add else None
    return x, weight, bias, running, z, act_arguments(name)


def check_norm(emulated, raw, shape, dtype, name, training, add, last, offset=0, low_parameters=True, affine=True):
    def run(op, running):
        return op(x, weight, bias, *running, z, training, 0.1, 1e-5, *act, keep)

    x, weight, bias, running, z, act = forward_args(shape, dtype, name, training, add, last, offset, low_parameters)
    if not affine:
        weight = bias = None
    keep = name in ONE_BIT
    other = [t.clone() for t in running]
    ours, theirs = run(emulated._batch_norm_act_forward, running), run(raw._batch_norm_act_forward, other)
    close(ours[:3], theirs[:3], dtype)
    close(running, other, dtype)
    assert ours[3].shape == theirs[3].shape
    mean, invstd = theirs[1:3]
    for spare in (None, z.clone() if add else None):
        close(emulated._batch_norm_act_apply(x, weight, bias, mean, invstd, z, *act, spare), theirs[0], dtype)
    grad = draw(shape, dtype, last, offset, seed=3)
    channels_last_flag = suggest_memory_format(x) != torch.contiguous_format
    for masked, want in itertools.product((False, True), ((1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1), (1, 0, 0, 1), (0, 0, 1, 1))):
        if (masked and not keep) or (want[3] and not add) or (keep and add and not masked):  # the last is never asked for
            continue
        need_x = training or want[1] or not masked
        for overwrite in (False, True):
            found = [
                op(grad.clone(), x if need_x else None, weight, bias, mean, invstd, None if masked else z, bits if masked else None,
                   training, channels_last_flag, *act, [bool(w) for w in want], overwrite)
                for op, bits in ((emulated._batch_norm_act_backward, ours[3]), (raw._batch_norm_act_backward, theirs[3]))
            ]  # fmt: skip
            close(*found, dtype, slack=x.numel() ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_shapes(emulated, raw, shape, dtype):
    for last, training in itertools.product((False, True), (True, False)):
        check_norm(emulated, raw, shape, dtype, "relu", training, add=False, last=last)
    check_norm(emulated, raw, shape, dtype, "relu", True, add=True, last=len(shape) == 4)


@pytest.mark.parametrize("name", KINDS)
def test_norm_activations(emulated, raw, name):
    for dtype, last, (training, add) in itertools.product((torch.float32, torch.bfloat16), (False, True), ((True, True), (False, False))):
        check_norm(emulated, raw, (2, 8, 3, 5), dtype, name, training, add, last)
    check_norm(emulated, raw, (2, 3, 3, 3), torch.float64, name, True, True, False)


def test_norm_alignment_and_parameters(emulated, raw):
    for last, dtype in itertools.product((False, True), (torch.float32, torch.float16)):
        check_norm(emulated, raw, (2, 8, 3, 5), dtype, "relu", True, True, last, offset=1)
        check_norm(emulated, raw, (2, 8, 3, 5), dtype, "silu", True, False, last, low_parameters=False)
        check_norm(emulated, raw, (2, 8, 3, 5), dtype, "relu", True, False, last, affine=False)


def test_many_parts(emulated, raw):
    """Reductions that are split over blocks: over images, within a plane, over rows."""
    for shape, last in (((40, 2, 30, 30), False), ((1, 1, 200, 170), False), ((2000, 8), False), ((3, 16, 40, 40), True)):
        check_norm(emulated, raw, shape, torch.float32, "relu", True, False, last)


def test_statistics_are_exact(emulated):
    """A mean far from 0 cancels nothing."""
    for shape, last in (((4, 3, 40, 40), False), ((4, 8, 40, 40), True)):
        x = draw(shape, torch.float32, last) + 3000
        _, mean, invstd, _ = emulated._batch_norm_act_forward(x, None, None, None, None, None, True, 0.1, 0.0, 0, 0.0, 0.0, 0.0, False)
        var, expected = torch.var_mean(x.double(), (0, 2, 3), correction=0)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-7, atol=0)
        torch.testing.assert_close(invstd.double(), var.rsqrt(), rtol=1e-6, atol=0)


def test_nan_stays_in_its_channel(emulated, raw):
    for last in (False, True):
        x = draw((2, 9, 5, 5), torch.float32, last)
        x[0, 4, 1, 1] = float("nan")
        out, mean, _, _ = emulated._batch_norm_act_forward(x, None, None, None, None, None, True, 0.1, 1e-5, *act_arguments("relu"), False)
        bad = out.isnan().flatten(2).any(2).any(0)
        assert bad.tolist() == [c == 4 for c in range(9)] and mean.isnan().tolist() == bad.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["relu", "silu", "identity"])
def test_group_norm(emulated, raw, dtype, name):
    act = act_arguments(name)
    for shape, groups, affine in (((3, 6, 7, 3), 3, True), ((2, 16, 40, 30), 4, True), ((2, 4, 200), 1, False), ((5, 8), 4, True), ((2, 6, 1, 1), 2, False)):
        x, grad = draw(shape, dtype), draw(shape, dtype, seed=1)
        weight, bias = parameters(shape[1], dtype) if affine else (None, None)
        ours, theirs = ([*o._group_norm_act_forward(x, weight, bias, groups, 1e-5, *act)] for o in (emulated, raw))
        for a, b in zip(ours, theirs):
            close(a, b, dtype, slack=32)
        close(emulated._group_norm_act_apply(x, weight, bias, *theirs[1:], *act, None), theirs[0], dtype, slack=32)
        for want, overwrite in itertools.product(((True, True, True), (True, False, False), (False, True, False)), (False, True)):
            found = [o._group_norm_act_backward(grad.clone(), x, weight, bias, *theirs[1:], *act, want, overwrite) for o in (emulated, raw)]
            for i, (a, b) in enumerate(zip(*found)):
                if want[i]:
                    close(a, b, dtype, slack=32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_gradients(emulated, raw, dtype):
    act = act_arguments("silu")
    for shape, last in (((3, 5, 7, 3), False), ((3, 16, 4, 3), True), ((2, 5, 4, 3), True), ((2, 3, 1, 1), False), ((2, 4, 200), False)):
        x, grad = draw(shape, dtype, last), draw(shape, dtype, last, seed=1)
        weight, bias = parameters(shape[1], dtype)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        statistics = [t.to(acc) for t in parameters(shape[1], torch.float32, seed=9)[::-1]]
        for arguments in ([None] * 4, [weight, bias, *statistics]):
            close(*[o._scale_grad(grad, x, *arguments, False, *act) for o in (emulated, raw)], dtype, slack=8)
    for shape in ((50, 7), (3, 40, 16), (1, 1)):
        x, grad = draw(shape, dtype), draw(shape, dtype, seed=1)
        close(*[o._scale_grad(grad, x, None, None, None, None, True, *act) for o in (emulated, raw)], dtype, slack=8)


# kernel, stride, padding, dilation of two axes, size of the input
WINDOWS = [((3, 3), (2, 2), (1, 1), (1, 1), (9, 8)), ((2, 2), (2, 2), (0, 0), (1, 1), (7, 6)), ((3, 2), (1, 2), (1, 0), (2, 1), (8, 9)),
           ((17, 17), (3, 3), (8, 8), (1, 1), (20, 18))]  # fmt: skip


def out_size(size, kernel, stride, padding, dilation):
    return [(s + 2 * p - d * (k - 1) - 1) // t + 1 for s, k, t, p, d in zip(size, kernel, stride, padding, dilation)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_pool(emulated, raw, dtype):
    for (*window, size), channels, last, offset in itertools.product(WINDOWS, (3, 8), (False, True), (0, 1)):
        x = draw((2, channels, *size), dtype, last, offset).round()
        x[0, 0, 2, 2] = float("nan")
        x[1, 1] = -float("inf")
        out = out_size(size, *window)
        found = [o._max_pool(x, *window, out, True) for o in (emulated, raw)]
        close(*found, dtype)
        close(emulated._max_pool(x, *window, out, False), raw._max_pool(x, *window, out, False), dtype)
        grad = draw((2, channels, *out), dtype, last, offset, seed=1)
        close(*[o._max_pool_backward(grad, found[0][1], size, *window, last) for o in (emulated, raw)], dtype, slack=4)


def test_max_pool_of_other_dimensions(emulated, raw):
    for size, window in (((11,), ((3,), (2,), (1,), (1,))), ((5, 6, 7), ((2, 3, 2), (1, 2, 2), (0, 1, 1), (1, 1, 1)))):
        for last in (False, True):
            x = draw((2, 8, *size), torch.float32, last)
            out = out_size(size, *window)
            found = [o._max_pool(x, *window, out, True) for o in (emulated, raw)]
            close(*found, torch.float32)
            close(*[o._max_pool_backward(found[1][0], found[1][1], size, *window, last) for o in (emulated, raw)], torch.float32)
    for size, out in (((11,), (4,)), ((7, 5), (3, 4)), ((7, 5), (9, 2)), ((5, 6, 7), (2, 3, 3))):  # adaptive
        x = draw((2, 8, *size), torch.float32, last=len(size) == 2)
        found = [o._max_pool(x, [], [], [], [], out, True) for o in (emulated, raw)]
        close(*found, torch.float32)
        close(*[o._max_pool_backward(found[1][0], found[1][1], size, [], [], [], [], len(size) == 2) for o in (emulated, raw)], torch.float32)
    empty = torch.empty(0, 3, 4, 4)
    close(*[o._max_pool(empty, [2, 2], [2, 2], [0, 0], [1, 1], [2, 2], True) for o in (emulated, raw)], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["relu", "silu", "identity"])
def test_norm_and_pool(emulated, raw, name, dtype):
    act = act_arguments(name)
    for (*window, size), channels, last, training in itertools.product(WINDOWS, (3, 8), (False, True), (True, False)):
        x = draw((2, channels, *size), dtype, last)
        weight, bias = parameters(channels, dtype)
        out = out_size(size, *window)
        running = [torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)]
        other = [t.clone() for t in running]
        found = [o._batch_norm_act_max_pool2d_forward(x, weight, bias, *r, training, 0.1, 1e-5, *act, *window, out, True)
                 for o, r in ((emulated, running), (raw, other))]  # fmt: skip
        close(found[0][:3], found[1][:3], dtype)
        close(running, other, dtype)
        _, mean, invstd, positions = found[1]
        # Rounding may make another of two near equals the greater: rare, and never on the same positions.
        assert (found[0][3] != positions).double().mean() < 0.01 and found[0][3].stride() == positions.stride()
        close(*[o._batch_norm_act_max_pool2d_apply(x, weight, bias, mean, invstd, positions, *act, *window, out) for o in (emulated, raw)], dtype)
        grad = draw((2, channels, *out), dtype, last, seed=1)
        for want in ((True, True, True), (True, False, False), (False, True, True)):
            close(*[o._batch_norm_act_max_pool2d_backward(grad, x, weight, bias, mean, invstd, positions, training, last, *act, *window, want)
                    for o in (emulated, raw)], dtype, slack=x.numel() ** 0.5)  # fmt: skip


def test_runs_are_equal(emulated):
    """Bit for bit, whatever the order in which the threads of a block run: the emulation turns it around from block to block."""
    x = draw((5, 16, 9, 9), torch.float32)
    runs = [emulated._batch_norm_act_forward(x, None, None, None, None, None, True, 0.1, 1e-5, *act_arguments("relu"), True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][:3], runs[1][:3]))


# Maps that an emulated device (two multiprocessors, two blocks on each) keeps on chip. Blocks of work: 5 in one part, of 26 times 9 threads; 6 in three parts, of 17 times
# 15 threads and channels that fill no two blocks; one.
ON_CHIP = [(2, 1032, 2, 3), (1, 264, 19, 13), (75, 8)]
WANTS = [(1, 1, 1, 1), (1, 0, 0, 0), (1, 0, 0, 1), (1, 1, 0, 0), (1, 0, 1, 1)]


def on_chip(op):
    """Forward and backward in training on maps that fit on chip: all results, and what the running statistics are then."""
    results = []
    for shape, dtype, name, add, affine in itertools.product(ON_CHIP, DTYPES, ("identity", "relu", "silu", "hardtanh", "gelu"), (False, True), (True, False)):
        if dtype == torch.float64 or (not affine and (add or name != "relu")) or (add and name not in ("identity", "relu", "gelu")):
            continue
        if shape == ON_CHIP[1] and name != "relu":  # the larger one
            continue
        act, keep = act_arguments(name), name in ONE_BIT
        x, grad = draw(shape, dtype, len(shape) == 4), draw(shape, dtype, len(shape) == 4, seed=3)
        z = draw(shape, dtype, len(shape) == 4, seed=2) if add else None
        weight, bias = parameters(shape[1], dtype) if affine else (None, None)
        running = [t.to(dtype) for t in parameters(shape[1], torch.float32, seed=9)[::-1]]
        out, mean, invstd, mask = op._batch_norm_act_forward(x, weight, bias, *running, z, True, 0.1, 1e-5, *act, keep)
        results += [out, mean, invstd, mask, *running]
        for want, overwrite, masked in itertools.product(WANTS, (False, True), (True, False)):
            if masked > keep or (keep and add and not masked) or (want[3] and not add):
                continue
            every = shape == ON_CHIP[0] and dtype == (torch.bfloat16 if add else torch.float32) and name in ("relu", "gelu")
            if not every and (want, overwrite) != (WANTS[0 if add else 3], add):
                continue
            results += op._batch_norm_act_backward(grad.clone(), x, weight, bias, mean, invstd, None if masked else z, mask if masked else None, True, len(shape) == 4, *act,
                                                   [bool(w) for w in want], overwrite)  # fmt: skip
    return results


def test_maps_on_chip(emulated, tmp_path):
    """One kernel that keeps the map, and the passes, in a process where TSMEM_PERSISTENT=0 allows no other: bit for bit the same."""
    found = on_chip(emulated)
    ways = [w for w in emulated._ways(found[0]) if any(f", {n} x {c}, " in w for n, c in ((12, 1032), (247, 264), (75, 8)))]
    assert len(ways) > 80 and all(": fused (" in w for w in ways), ways
    code = f"""
import conftest, torch, test_cuda_emulated
conftest.load()
torch.ops.load_library({str(conftest.emulated_library())!r})
torch.save(test_cuda_emulated.on_chip(torch.ops.tsmem_emulated), {str(tmp_path / "passes.pt")!r})
assert torch.ops.tsmem_emulated._ways(torch.zeros(1)) == []
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent,
                          env={**os.environ, "TSMEM_PERSISTENT": "0", "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = torch.load(tmp_path / "passes.pt")
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)))


def test_what_stays_with_the_passes(emulated):
    """Planes, rows that are no whole octets, memory that is not aligned, f64, eval mode, and maps that do not fit."""
    for shape, dtype, last, offset, training in (((2, 8, 6, 7), torch.float32, False, 0, True), ((2, 7, 6, 7), torch.float32, True, 0, True),
                                                 ((2, 8, 6, 7), torch.bfloat16, True, 1, True), ((2, 8, 6, 7), torch.float64, True, 0, True),
                                                 ((2, 8, 7, 7), torch.float32, True, 0, False), ((1, 512, 16, 16), torch.float32, True, 0, True)):  # fmt: skip
        x, before = draw(shape, dtype, last, offset), emulated._ways(torch.zeros(1))
        running = [torch.zeros(shape[1]), torch.ones(shape[1])]
        emulated._batch_norm_act_forward(x, None, None, *running, None, training, 0.1, 1e-5, *act_arguments("relu"), True)
        assert emulated._ways(torch.zeros(1)) == before


# The emulated device has room for 4 blocks of 256 threads: more elements are the later ones of a thread.
THREADS = 1024


def philox(counter, thread, seed):
    """Philox4x32-10 (Salmon et al., 2011), for arrays of counters and threads: [..., 4] words."""
    words = [counter & 0xFFFFFFFF, counter >> 32, thread & 0xFFFFFFFF, thread >> 32]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(b >> 32) ^ words[1] ^ keys[0], b & 0xFFFFFFFF, (a >> 32) ^ words[3] ^ keys[1], a & 0xFFFFFFFF]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def test_philox_is_random123s():
    """Known answers of Random123 (kat_vectors)."""
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def noise_of(n, group, keep, seed, counter):
    """ATen/native/cuda/Dropout.cu's noise of n elements, in the order of memory (group 1: of indices)."""
    threads = min((n + 255) // 256 * 256, THREADS)
    noise = []
    for i in range(n):
        if group == 1:
            thread, at = i % threads, i // threads
            words = philox(counter // 4 + at // 4, thread, seed)[at % 4]
        else:
            thread, at = i // group % threads, i // (group * threads)
            fours = (group + 3) // 4
            words = philox(counter // 4 + at * fours + i % group // 4, thread, seed)[i % group % 4]
        uniform = torch.tensor(words, dtype=torch.float32) * 2.0**-32 + 2.0**-33
        noise.append(float(uniform < keep))
    return torch.tensor(noise)


def group_of(n, size, offset):
    """As many elements as 16 bytes hold, memory is aligned to and leave no rest."""
    group = 16 // size
    while n % group or offset % group:
        group //= 2
    return group


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(emulated, dtype):
    size = dtype.itemsize
    for n, offset in ((1, 0), (7, 0), (1002, 0), (1024, 0), (1024, 1), (1036, 4), (2 * THREADS + 512, 2), (8 * THREADS + 8, 0), (4 * THREADS + 3, 0)):
        x = draw((n,), dtype, offset=offset)
        out, state, group = emulated._fused_dropout(x, 0.3)
        assert group == group_of(n, size, offset) and state.dtype == torch.int64 and state[1] == 8
        expected = noise_of(n, group, torch.tensor(0.7, dtype=torch.float32 if size < 8 else dtype), state[0].item() & (2**64 - 1), 8)
        acc = torch.float64 if size == 8 else torch.float32
        scale = (1 / torch.tensor(0.7, dtype=acc).double()).to(acc)  # of 1 - p as that dtype has it
        assert torch.equal(out, (x.to(acc) * expected.to(acc) * scale).to(dtype))
        # The gradient lies elsewhere, and is drawn for as x was.
        for other in (0, 1):
            grad = draw((n,), dtype, offset=other, seed=1)
            again = emulated._fused_dropout_again(grad, state, 0.3, group, grad.stride())
            assert torch.equal(again, (grad.to(acc) * expected.to(acc) * scale).to(dtype))


def test_dropout_in_other_layouts(emulated):
    """Groups go in the order of memory, single elements in that of indices; the result has x's strides, and so has what is drawn for a gradient."""
    for shape in ((2, 8, 5, 3), (3, 5, 7, 3)):
        x = draw(shape, torch.float32, last=True)
        out, state, group = emulated._fused_dropout(x, 0.5)
        noise = noise_of(x.numel(), group, 0.5, state[0].item() & (2**64 - 1), 8)
        noise = noise.view(shape) if group == 1 else torch.empty_like(x).copy_(torch.as_strided(noise, shape, x.stride()))
        assert out.stride() == x.stride() and torch.equal(out, x * noise * 2)
        grad = draw(shape, torch.float32, seed=1)
        again = emulated._fused_dropout_again(grad, state, 0.5, group, x.stride())
        assert again.stride() == x.stride() and torch.equal(again, grad * noise * 2)
    nan = torch.full((64,), float("nan"))
    assert emulated._fused_dropout(nan, 0.5)[0].isnan().all()  # times 0, as PyTorch's


def test_dropout_as_public_op(emulated):
    """The op on the emulated device, in the CPU's place: 16 bytes are kept, gradients of every order, and what is recomputed."""
    code = """
import torch, conftest
from op_checks import saved
ops = conftest.load()
x = torch.randn(64, 33, dtype=torch.float64, requires_grad=True)
(kept,), y = saved(lambda: ops.dropout(x, 0.4, True))
assert kept.dtype == torch.int64 and kept.numel() == 2, kept
(grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
assert torch.equal(grad == 0, y == 0) and torch.equal(grad, torch.autograd.grad(y.sum(), x)[0])
def seeded(x):
    torch.manual_seed(0)
    return ops.dropout(x, 0.4, True)
z = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(seeded, z) and torch.autograd.gradgradcheck(seeded, z)
def recomputed(x):
    torch.manual_seed(0)
    y = ops.dropout(x * 2, 0.4, True, False, 1)
    return torch.ops.tsmem.linear(y, w, None, 1)
w = torch.randn(5, 10, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(recomputed, z)
assert torch.equal(ops.dropout(x, 0.4, False), x) and torch.equal(ops.dropout(x.detach(), 0.0, True), x)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent,
                          env={**os.environ, "TSMEM_EMULATED_CUDA": "1", "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr


@pytest.mark.parametrize("switch", ["", "0"])
def test_convolutions_of_a_norm_read_its_input(switch):
    """The weight's gradient, and a convolution that runs again, by the fused graphs: emulated, their operations one by one."""
    code = """
import os, sys, torch
import conftest
conftest.load()
torch.ops.load_library(str(conftest.emulated_library()))
ops = torch.ops.tsmem
last = torch.channels_last
def numbers(*shape):
    return (torch.randn(*shape) * 0.5).half()
def convolution(x, w, again, bias=None):
    return ops.conv2d(x, w, bias, [1, 1], [1, 1], [1, 1], 1, again)
def step(fused, training=True, mean=0.0, again=0, dtype=torch.half, width=24, bias=False):
    torch.backends.cudnn.benchmark = fused
    torch.manual_seed(0)
    x = numbers(2, 16, 9, 9).to(dtype).to(memory_format=last).requires_grad_()
    w1, w2, w3 = (numbers(k, c, 3, 3).to(dtype).to(memory_format=last).requires_grad_() for k, c in ((width, 16), (32, width), (8, 32)))
    norms = [[torch.rand(c) + 0.5, torch.randn(c), torch.randn(c) * 0.1 + mean, torch.rand(c) + 0.5] for c in (width, 32)]
    b2 = numbers(32).to(dtype).requires_grad_() if bias else None
    for weight, bias, *_ in norms:
        weight.requires_grad_(), bias.requires_grad_()
    def normed(y, n):
        return ops.batch_norm_act(y, *n, training, 0.1, 1e-5, True, "relu", [], 1)
    y = convolution(x, w1, 0)
    y = convolution(normed(y, norms[0]), w2, again, b2)
    y = convolution(normed(y, norms[1]), w3, 0)
    inputs = [x, w1, w2, w3, *[p for n in norms for p in n[:2]]]
    return y, torch.autograd.grad((y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), inputs)
def compare(**options):
    plain, fused = step(False, **options), step(True, **options)
    assert torch.equal(plain[0], fused[0])
    differ = 0
    for a, b in zip(plain[1], fused[1]):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert (a.double() - b.double()).norm() <= 4e-3 * a.double().norm(), options
        differ += not torch.equal(a, b)
    return differ
if os.environ.get("TSMEM_CUDNN") == "0":
    assert compare() == 0
    sys.exit(print("fine"))
assert compare() == 2, "the gradients of two weights are fused, and nothing else"
assert compare(training=False) == 2
assert compare(again=1) > 2, "a convolution runs again fused"
assert compare(again=1, bias=True) == 2, "one with a bias runs again as PyTorch runs it"
assert compare(dtype=torch.float) == 0 and compare(width=20) == 1, "16 bits and channels in eights alone"
# The benchmark flag alone lets it choose, and determinism never does.
torch.backends.cudnn.deterministic = True
assert compare() == 0
torch.backends.cudnn.deterministic = False
# A mean far from 0: coefficients of 16 bits would lose too much, and from then on this shape is PyTorch's.
assert compare(width=40, training=False) == 2
assert compare(width=48, training=False, mean=60.0) == 0
assert compare(width=48, training=False) < 2
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent,
                          env={**os.environ, "TSMEM_EMULATED_CUDA": "1", "TSMEM_CUDNN": switch, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr


FUSED = """
import torch, conftest
conftest.load()
torch.ops.load_library(str(conftest.emulated_library()))
torch.backends.cudnn.benchmark = True
ops, emulated, last = torch.ops.tsmem, torch.ops.tsmem_emulated, torch.channels_last
def numbers(*shape, dtype=torch.half):
    return (torch.randn(*shape) * 0.5).to(dtype).to(memory_format=last)
def gradient(x, grad, mean, invstd, weight, bias, k=8):
    return emulated._norm_relu_conv_weight_gradient(x, weight, bias, mean, invstd, grad, [k, x.size(1), 3, 3], [1, 1], [1, 1], [1, 1])
def ways(*words):
    return [w for w in emulated._ways(torch.zeros(1)) if all(word in w for word in words)]
"""


def run_fused(code, **environment):
    done = subprocess.run([sys.executable, "-c", FUSED + code + "\nprint('fine')"], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent,
                          env={**os.environ, "TSMEM_EMULATED_CUDA": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment})  # fmt: skip
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr


def test_coefficients_that_lose_at_a_mean_far_from_zero():
    """The scale's rounding times the mean counts, also where the shift is a number of 16 bits by chance."""
    run_fused("""
def taken(mean, scale, shift):
    x = numbers(2, 8, 6, 6) + mean
    mean, invstd = torch.full((8,), mean), torch.ones(8)
    weight = torch.full((8,), scale)
    bias = (mean * weight + shift)
    return gradient(x, numbers(2, 8, 6, 6), mean, invstd, weight, bias) is not None
near, far = 1 + 2**-11 - 2**-16, 64.0  # rounded to 1, half a unit off
assert taken(0.0, near, 0.5)
taken(far, near, -far)  # the device notes it for the next call
assert not taken(far, near, -far) and ways("gradient of a convolution", "lose too much"), ways("gradient")
""")


def test_results_that_tell_nothing_are_tried_later():
    """Zeros, as where a residual block's last norm begins with them, and what is not finite: plain, and tried at the second, fourth, eighth use."""
    run_fused("""
x, grad = numbers(2, 16, 5, 5), numbers(2, 8, 5, 5)
norm = [torch.zeros(16), torch.ones(16), torch.ones(16), torch.zeros(16)]
for use in range(1, 6):
    assert gradient(x, torch.zeros_like(grad), *norm) is None
    assert ways("plain so far", "all zeros or not finite"), ways()
assert gradient(x, torch.full_like(grad, float("inf")), *norm) is None
assert gradient(x, grad, *norm) is None and gradient(x, grad, *norm) is not None and len(ways("fused (")) == 1, ways()
# A norm's own kernels.
x, relu = torch.randn(2, 8, 5, 5).to(memory_format=last), [1, 0.0, 0.0, 0.0]
assert relu[0] == __import__("test_cuda_emulated").act_arguments("relu")[0]
out, mean, invstd, mask = emulated._batch_norm_act_forward(x, None, None, None, None, None, True, 0.1, 1e-5, *relu, True)
for grad, said in ((torch.zeros_like(x), "plain so far"), (x, "fused (")):
    emulated._batch_norm_act_backward(grad, x, None, None, mean, invstd, None, mask, True, True, *relu, [True, False, False, False], False)
    assert len(ways("batch norm's gradient", said)) == 1, ways()
""")


def test_sizes_that_change_at_every_step_are_tried_a_few_times():
    run_fused("""
norm = [torch.zeros(8), torch.ones(8), torch.ones(8), torch.zeros(8)]
taken = [gradient(numbers(1, 8, 4, 4 + i), numbers(1, 8, 4, 4 + i), *norm) is not None for i in range(20)]
assert taken == [True] * 16 + [False] * 4, taken
assert gradient(numbers(1, 8, 4, 4), numbers(1, 8, 4, 4), *norm) is not None, "what was found holds"
relu = __import__("test_cuda_emulated").act_arguments("relu")
for i in range(20):
    emulated._batch_norm_act_forward(numbers(1, 8, 4, 4 + i, dtype=torch.float), None, None, None, None, None, True, 0.1, 1e-5, *relu, True)
assert len(ways("batch norm on")) == 16, ways()
""")


def test_a_fused_convolution_that_is_not_taken_costs_nothing():
    """No operand is made for it, no gradient copied, and fake tensors, which no kernel can read, are left alone."""
    run_fused("""
import collections
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
def backward_of(dtype, format, training=True):
    draw = lambda *shape: (torch.randn(*shape) * 0.5).to(dtype).to(memory_format=format).requires_grad_()
    x, y, w1, w2, w3 = draw(2, 8, 9, 9), draw(2, 8, 9, 9), draw(16, 8, 3, 3), draw(8, 24, 3, 3), draw(8, 8, 3, 3)
    def normed(t):
        c = t.size(1)
        weight, bias = torch.ones(c).requires_grad_(), torch.zeros(c).requires_grad_()
        return ops.batch_norm_act(t, weight, bias, torch.zeros(c), torch.ones(c), training, 0.1, 1e-5, True, "relu", [], 1)
    def convolution(t, w, again):
        return ops.conv2d(t, w, None, [1, 1], [1, 1], [1, 1], 1, again)
    joined = ops.cat([convolution(x, w1, 0), y], 1, 1)
    out = convolution(normed(convolution(normed(joined), w2, 1)), w3, 0)
    def run():
        out.float().square().sum().backward()
    return run
def calls(f):
    with profile(acc_events=True) as p:
        f()
    return collections.Counter(e.name for e in p.events())
def fused(counts):
    return sum(n for name, n in counts.items() if name.startswith("tsmem::_norm_relu_conv"))
torch.backends.cudnn.benchmark = False
off = calls(backward_of(torch.half, last))
assert fused(off) == 0 and off["aten::cat"] == 1, off
torch.backends.cudnn.benchmark = True
assert fused(calls(backward_of(torch.half, last))) > 0
for dtype, format in ((torch.float, last), (torch.float, torch.contiguous_format), (torch.half, torch.contiguous_format)):
    backward_of(dtype, format)()  # which tries the norms' kernels
    on = calls(backward_of(dtype, format))
    torch.backends.cudnn.benchmark = False
    assert fused(on) == 0 and on == calls(backward_of(dtype, format)), (dtype, format)
    torch.backends.cudnn.benchmark = True
with FakeTensorMode():
    backward_of(torch.half, last)()
""")


def test_profile_says_what_ran():
    code = """
import torch, conftest, tsmem
torch.ops.load_library(str(conftest.emulated_library()))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16)
    def forward(self, x):
        return torch.relu(self.norm(self.conv(x.contiguous(memory_format=torch.channels_last))))
model = torch.jit.trace(Net(), torch.randn(2, 3, 8, 8))  # there is no source to script
assert tsmem.profile(model, input="2x3x8x8")["ways"] == []
ways = tsmem.profile(tsmem.rewrite(model), input="2x3x8x8")["ways"]
assert len(ways) == 2 and all(w.startswith("batch norm") and ": fused (" in w for w in ways), ways
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent,
                          env={**os.environ, "TSMEM_EMULATED_CUDA": "1", "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr
