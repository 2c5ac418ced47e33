"""Every module of torch.testing._internal, scripted, through a rewrite at both levels: outputs, gradients, buffers, strides, errors and draws."""
import re
from dataclasses import dataclass, field

import pytest
import torch

from command_line import run
from expected import MODULES as EXPECTED
from samples import DTYPES, MODULES, ModuleErrorEnum, compare, difference, fresh, shapes, step, tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # the samples' own: deprecated arguments and the like

# Alike but for combinations of flags: a few of their many samples.
LARGE = re.compile(r"nn\.(Transformer|MultiheadAttention|RNN$|GRU$|LSTM$|CTCLoss)")


@dataclass
class Sample:
    name: str
    module: torch.jit.ScriptModule
    args: list
    kwargs: dict
    text: str


@dataclass
class Findings:
    modules: set = field(default_factory=set)
    samples: int = 0
    checks: int = 0
    wrong: list = field(default_factory=list)  # one sentence each


class Holder(torch.nn.Module):
    """Modules that are called on their own, rewritten by one run of the tool."""

    def forward(self, x):
        return x


def spread(samples, most):
    """At most so many, over the whole list."""
    return [samples[i * len(samples) // most] for i in range(most)] if len(samples) > most else samples


def inputs(info, dtype, training):
    """(whose, constructor's input, forward's input) of some samples, and of those on which forward is to raise."""
    most = 1 if dtype != torch.float64 else 2 if LARGE.search(info.name) else 4
    options = dict(device="cpu", dtype=dtype, requires_grad=True, training=training)
    found = [s for s in info.module_inputs_func(info, **options) if s.forward_input is not None]
    found = spread(found, most)
    if info.module_error_inputs_func is not None and dtype == torch.float64 and training:
        found += [e.module_error_input for e in info.module_error_inputs_func(info, **options) if e.error_on == ModuleErrorEnum.FORWARD_ERROR]
    return found


def scripted_samples(dtype, findings):
    found = []
    for name, info in MODULES.items():
        failed, scripted = [], 0
        for training in (True, False) if info.train_and_eval_differ or dtype == torch.float64 else (True,):
            torch.manual_seed(0)
            for sample in inputs(info, dtype, training):
                try:
                    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype).train(training)
                    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):  # the first call makes its parameters
                        module(*fresh(list(sample.forward_input.args)), **fresh(dict(sample.forward_input.kwargs)))
                    module = torch.jit.script(module)
                except Exception as error:
                    failed.append(" ".join(str(error).split())[:160])
                    continue
                args, kwargs = list(sample.forward_input.args), dict(sample.forward_input.kwargs)
                found.append(Sample(name, module, args, kwargs, f"{name} {dtype} {'train' if training else 'eval'} {shapes(args, kwargs)}"))
                scripted += 1
        if not scripted:
            findings.wrong.append(f"{name} {dtype} can't be scripted: {failed[0] if failed else 'no sample'}")
    return found


def call(module, sample):
    """The step's result, and the generator's state and the buffers after it."""
    args, kwargs = fresh(sample.args), fresh(sample.kwargs)
    result = step(lambda: module(*args, **kwargs), tensors(args) + tensors(kwargs) + list(module.parameters()))
    return result, torch.get_rng_state(), {k: b.clone() for k, b in module.named_buffers()}


def check(dtype, findings, folder):
    samples = scripted_samples(dtype, findings)
    holder = Holder()
    for i, sample in enumerate(samples):
        setattr(holder, f"m{i}", sample.module)
    torch.jit.script(holder).save(folder / "pytorch.pt")
    calls = 3 if dtype == torch.float64 else 2  # TorchScript optimises after the first
    pytorch = torch.jit.load(folder / "pytorch.pt")
    expected = [[call(getattr(pytorch, f"m{i}"), s) for _ in range(calls)] for i, s in enumerate(samples)]
    for level in ("ops", "regions"):
        done = run("rewrite", folder / "pytorch.pt", "-o", folder / "ours.pt", "--force", "--level", level)
        assert done.returncode == 0, done.stderr
        ours = torch.jit.load(folder / "ours.pt")
        for i, sample in enumerate(samples):
            for turn in range(calls):
                result, draws, buffers = call(getattr(ours, f"m{i}"), sample)
                theirs, their_draws, their_buffers = expected[i][turn]
                sentences, checks = compare(result, theirs)
                if not isinstance(theirs, Exception):
                    findings.modules.add(sample.name)
                    sentences += [f"buffer {k}: {s}" for k, b in their_buffers.items() if (s := difference(buffers[k], b))]
                    if turn == 2 and not torch.equal(draws, their_draws):  # docs/troubleshooting.md: earlier calls of PyTorch may draw other numbers
                        sentences.append("the generator's state differs")
                findings.checks += checks + len(their_buffers)
                findings.wrong += [f"{sample.text} {level}, call {turn + 1}: {s}" for s in sentences]
    findings.samples += len(samples)


@pytest.fixture(scope="module")
def findings(ops, tmp_path_factory):
    torch.set_num_threads(1)
    found = Findings()
    for dtype in DTYPES:
        check(dtype, found, tmp_path_factory.mktemp("modules"))
    print(f"\n{len(found.modules)} modules, {found.samples} samples, {found.checks} checks")
    return found


def test_modules(findings):
    unexpected = [w for w in findings.wrong if not any(re.search(pattern, w) for pattern in EXPECTED)]
    assert not unexpected, f"{len(unexpected)} differences:\n" + "\n".join(unexpected[:200])
    assert len(findings.modules) > 80


@pytest.mark.parametrize("pattern", EXPECTED)
def test_expected_difference_is_there(findings, pattern):
    """An entry of the list that nothing needs any more is to be struck."""
    assert any(re.search(pattern, w) for w in findings.wrong)
