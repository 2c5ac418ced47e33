"""Every operator of torch.testing._internal that has a twin among ours: outputs, gradients, second derivatives, strides, errors, meta shapes, opcheck."""
import itertools
import re

import pytest
import torch

from expected import OPERATORS as EXPECTED
from samples import DTYPES, OPERATORS, compare, fresh, last_line, shapes, step, tensors
from twins import TWINS

pytestmark = pytest.mark.filterwarnings("ignore")  # the samples' own: deprecated arguments and the like

INFOS = {key: info for key, info in OPERATORS.items() if key[0] in TWINS}
MOST = {torch.float64: 12, torch.float32: 5, torch.bfloat16: 5}  # samples of an operator and a dtype


def call(f, sample, **options):
    args = fresh([sample.input, *sample.args])
    kwargs = fresh(sample.kwargs)
    return step(lambda: f(*args, **kwargs), tensors(args) + tensors(kwargs), **options)


def samples_of(info, dtype):
    """As they are, and some of them not contiguous."""
    if dtype not in info.supported_dtypes("cpu"):
        return []
    torch.manual_seed(0)
    backward = dtype in info.supported_backward_dtypes("cpu")
    found = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=backward), 200))
    step_ = max(1, len(found) // MOST[dtype])
    chosen = found[::step_][: MOST[dtype]]
    return [(s, "") for s in chosen] + [(s.noncontiguous(), "non-contiguous ") for s in chosen[:4]]


def on_meta(sample):
    return sample.transform(lambda t: t.detach().to("meta") if isinstance(t, torch.Tensor) else t)


def check(key, ops):
    """(sentences, samples, checks)"""
    info, wrong, samples, checks = INFOS[key], [], 0, 0

    def twin(*args, **kwargs):
        torch.manual_seed(42)  # as the database's own wrapper of random operators does
        return TWINS[key[0]](ops, *args, **kwargs)

    for dtype in DTYPES:
        for i, (sample, layout) in enumerate(samples_of(info, dtype)):
            text = f"{key[0]} {key[1]} {dtype} {layout}{shapes(sample.input, sample.args, sample.kwargs)}"
            second = dtype == torch.float64 and i < 4 and info.supports_gradgrad
            pytorch, ours = call(info.op, sample, second=second), call(twin, sample, second=second)
            if isinstance(ours, dict) and not ours["output"]:
                continue  # this sample has no twin
            sentences, n = compare(ours, pytorch)
            samples, checks = samples + 1, checks + n
            if dtype == torch.float64 and isinstance(pytorch, dict) and not layout:
                meta = call(twin, on_meta(sample))
                expected = [(t.shape, t.dtype, t.stride()) for t in pytorch["output"]]
                got = last_line(meta) if isinstance(meta, Exception) else [(t.shape, t.dtype, t.stride()) for t in meta["output"]]
                checks += 1
                if got != expected:
                    sentences.append(f"on meta: {got} in place of {expected}")
            wrong += [f"{text}: {s}" for s in sentences]
    if info.error_inputs_func is not None:
        for error in info.error_inputs("cpu"):
            if error.sample_input.input is None:
                continue
            pytorch, ours = call(info.op, error.sample_input), call(twin, error.sample_input)
            if isinstance(ours, dict) and not ours["output"]:
                continue
            sentences, n = compare(ours, pytorch)
            checks += n
            wrong += [f"{key[0]} {key[1]} error {shapes(error.sample_input.input, error.sample_input.args)}: {s}" for s in sentences]
    return wrong, samples, checks


@pytest.fixture(scope="module")
def findings(ops):
    torch.set_num_threads(1)
    found, samples, checks = [], 0, 0
    for key in INFOS:
        wrong, n, m = check(key, ops)
        found, samples, checks = found + wrong, samples + n, checks + m
    print(f"\n{len(INFOS)} operators, {samples} samples, {checks} checks")
    return found


def test_every_twin_is_compared():
    assert set(TWINS) <= {name for name, _ in INFOS}


def test_operators(findings):
    unexpected = [w for w in findings if not any(re.search(pattern, w) for pattern in EXPECTED)]
    assert not unexpected, f"{len(unexpected)} differences:\n" + "\n".join(unexpected[:400])


@pytest.mark.parametrize("pattern", EXPECTED)
def test_expected_difference_is_there(findings, pattern):
    """An entry of the list that nothing needs any more is to be struck."""
    assert any(re.search(pattern, w) for w in findings)


class Recorder:
    """Stands for torch.ops.tsmem: calls its operators, and keeps each one's overload and arguments."""

    def __init__(self, ops):
        self.ops, self.calls = ops, []

    def __getattr__(self, name):
        packet = getattr(self.ops, name)

        def call(*args, **kwargs):
            overload = torch._C._jit_resolve_packet(f"tsmem::{name}", *args, **kwargs)
            self.calls.append((getattr(packet, overload or "default"), args, kwargs))
            return packet(*args, **kwargs)

        return call


@pytest.mark.parametrize("key", INFOS, ids=" ".join)
def test_opcheck(ops, key):
    """Schemas tell the truth about writes and aliases, and shapes on fake tensors are right."""
    for sample, _ in samples_of(INFOS[key], torch.float32)[:1]:
        recorder = Recorder(ops)
        TWINS[key[0]](recorder, fresh(sample.input), *fresh(list(sample.args)), **fresh(sample.kwargs))
        for overload, args, kwargs in recorder.calls:
            torch.library.opcheck(overload, args, kwargs, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
