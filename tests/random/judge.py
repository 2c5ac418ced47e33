"""Is a rewritten program the same as the original? What each tolerance is, and who decides where they differ."""
import re
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Optional

import torch

import step
from step import Record


@dataclass
class Original:
    """What the original does. Every call of every other begins with the state that the original's began with."""

    config: dict
    source: str
    load: Callable  # a fresh original
    eager: Callable  # a fresh eager module with the original's state
    states: List[Record]  # before each call
    records: List[Record]
    others: Dict[str, List[Record]] = field(default_factory=dict)  # the rarer questions, asked when there is a difference
    spread: Optional[Dict[str, float]] = None  # as far as it has been asked for
    further: Optional[Iterator[Dict[str, float]]] = None


def once(name: str):
    """Keeps what a question's answer was."""
    def wrap(f):
        def ask(o: Original) -> List[Record]:
            if name not in o.others:
                o.others[name] = f(o)
            return o.others[name]
        return ask
    return wrap


@once("float64")
def float64(o: Original) -> List[Record]:
    return step.run(o.load().double(), o.config, torch.float64, states=o.states)


@once("steady")
def steady(o: Original) -> List[Record]:
    """By an original that has been called four times with grad mode on: from its third call on TorchScript runs what it has optimised."""
    module = o.load()
    step.run(module, {**o.config, "calls": [(train, flag, n, True) for train, flag, n, _ in o.config["calls"]]}, states=o.states)
    return step.run(module, o.config, states=o.states)


@once("first")
def first(o: Original) -> List[Record]:
    """Each call as the first of a fresh original, which TorchScript has not optimised."""
    records = []
    for call in range(len(o.records)):
        module = o.load()
        step.restore(module, o.states[call])
        records.append(step.guarded(module, o.config, call))
    return records


@once("repeated")
def repeated(o: Original) -> List[Record]:
    """Each call as the fourth of its kind of a fresh original."""
    records = []
    for call in range(len(o.records)):
        module = o.load()
        for _ in range(4):
            step.restore(module, o.states[call])
            record = step.guarded(module, o.config, call)
        records.append(record)
    return records


@once("unoptimised")
def unoptimised(o: Original) -> List[Record]:
    """By an original whose graph TorchScript runs as it is."""
    with torch.jit.optimized_execution(False):
        return step.run(o.load(), o.config, states=o.states)


@once("eager")
def eager(o: Original) -> List[Record]:
    return step.run(o.eager(), o.config, states=o.states)


def growing_spread(o: Original) -> Iterator[Dict[str, float]]:
    """How far the original's own results move when its inputs and weights move by a rounding error: a sum that is zero but for rounding, a maximum between equals. From run to run it can only grow, and whoever asks may stop: so it
    is kept, and goes on from there."""
    if o.spread is None:
        o.spread, o.further = {}, further_spread(o)
    yield o.spread
    for found in o.further:
        for k, e in found.items():
            o.spread[k] = max(o.spread.get(k, 0.0), e)
        yield o.spread


def further_spread(o: Original) -> Iterator[Dict[str, float]]:
    for other in (steady(o), eager(o)):  # constants that TorchScript's derivatives round to float32, or eager's do
        yield {k: e for k, e in step.errors(o.records, other).items() if e < 1e-6}
    if resolution(o) == torch.float64:  # where terms of a sum cancel, float32 is off by 2**29 times as much
        yield {k: e * 2.0**-29 for k, e in step.errors(o.records, step.run(o.load().float(), o.config, torch.float32, states=o.states)).items()}
    eps = step.EPS[resolution(o)]
    for seed, factor in enumerate((1.0, 8.0, 64.0) * 4):
        generator = torch.Generator().manual_seed(seed)
        states = [{**s, "tensors": [t * (1 + eps * factor * torch.randn(t.shape, generator=generator, dtype=torch.float64)).to(t.dtype) if t.is_floating_point() else t for t in s["tensors"]]} for s in o.states]
        moved = step.run(o.load(), o.config, noise=eps * factor, states=states)
        yield {**step.errors(o.records, moved), **drawn_otherwise(o.records, moved)}


def drawn_otherwise(a: List[Record], b: List[Record]) -> Dict[str, float]:
    """The calls after which the generator is elsewhere: rrelu draws a number for each value that is not positive."""
    return {f"call {i + 1}: generator": 1.0 for i, (x, y) in enumerate(zip(a, b)) if "generator" in x and "generator" in y and not torch.equal(x["generator"], y["generator"])}


# PyTorch takes their constants as float32 in some of its derivatives, tsmem never does: docs/troubleshooting.md.
FLOAT32_CONSTANTS = re.compile(r"[hH]ardsigmoid|[lL]eaky_?[rR]e[lL][uU]_?\(.*0\.1|[cC][eE][lL][uU]|[sS][eE][lL][uU]")


# A dropout with p = 0 or p = 1: whether TorchScript's draws, gives its input itself or reads that at all depends on the call.
DROPS_NONE_OR_ALL = re.compile(r"[dD]ropout\w*\((.*, )?[01]\.0")


def by_itself(o: Original, line: str) -> bool:
    """Whether TorchScript decides about this line by what it takes for unused or differentiates itself, which depends on the call."""
    what = line.split(": ")[1]
    return what.startswith("state ") or bool(DROPS_NONE_OR_ALL.search(o.source)) and (what == "generator" or "shares memory with" in what)


def dropped(o: Original, call: int, reference: Record, line: str) -> bool:
    """Whether the line is about a norm's statistics that the reference leaves as they were where eager PyTorch moves them: TorchScript has dropped the norm, as nothing uses its result, in this call or in one of two."""
    name = line.split(": ")[1].removeprefix("state ")
    before = dict(zip(o.load().state_dict(), o.states[call]["tensors"]))
    statistics = re.fullmatch(r".*running_(mean|var)", name) or re.search(rf"(batch|instance)_norm\(.*self\.{re.escape(name.split('.')[-1])}\b", o.source)
    if not statistics or name not in before or len(eager(o)) <= call:
        return False
    return torch.equal(before[name], reference[f"state {name}"]) and not torch.equal(before[name], eager(o)[call][f"state {name}"])


def as_original(line: str, mine: List[str]) -> bool:
    """Whether the line is about a requires_grad that is as the original's of this call: TorchScript's optimised graphs say so of what they make under no_grad, and its first do not."""
    what = line.split(": ")[1]
    return what.endswith("requires_grad") and not any(m.split(": ")[1] == what for m in mine)


def needs_grad_as_eager(o: Original, records: List[Record], call: int, line: str) -> bool:
    """Whether the line is about a requires_grad that is as eager PyTorch's: what TorchScript has optimised as a whole says that all its results need a gradient."""
    what = line.split(": ")[1]
    return what.endswith("requires_grad") and len(eager(o)) > call and what in records[call] and eager(o)[call].get(what) == records[call][what]


def raises_as_eager(o: Original, mine: List[str]) -> bool:
    """Whether all that is wrong is an error that eager PyTorch raises too, in this call or an earlier one: TorchScript has moved what the program overwrites."""
    raised = step.raised(eager(o))
    return bool(raised) and len(mine) == 1 and f"raises {raised[:60]}" in mine[0]


def raises_where_gradients_are_lost(o: Original, call: int, mine: List[str]) -> bool:
    """Whether TorchScript's derivative finds a value overwritten, and the original does not only because its optimised graph gives no gradient there, or another one than eager PyTorch."""
    overwritten = "raises RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation"
    if len(mine) != 1 or overwritten not in mine[0] or "torch::jit::" not in mine[0]:
        return False
    by_eager = differences(o, o.records, eager(o))
    return any(line.startswith(f"call {call + 1}: gradient") for line in by_eager)


def resolution(o: Original) -> torch.dtype:
    if "autocast(" in o.source or o.config["autocast"]:
        return torch.bfloat16 if o.config["dtype"] != "float64" or ".float()" in o.source else torch.float64
    if o.config["dtype"] == "float64" and ".float()" in o.source:
        return torch.float32
    return step.dtype_of(o.config)


def too_far(o: Original, records: List[Record], reference: List[Record]) -> Dict[str, float]:
    """The tensors that are further from the reference than rounding explains."""
    apart = step.errors(reference, records)
    if resolution(o) == torch.float64:
        return {k: e for k, e in apart.items() if e > (1e-6 if FLOAT32_CONSTANTS.search(o.source) else 1e-9)}
    if not any(apart.values()):
        return {}
    exact = float64(o)
    eps = step.EPS[resolution(o)]
    if step.raised(exact):
        return {k: e for k, e in apart.items() if e > 64 * eps}
    ours, pytorchs = step.errors(exact, records), step.errors(exact, reference)
    # A tensor that has no float64 twin is held against the original.
    return {k: e for k, e in apart.items() if e > 0 and (ours.get(k, e) > 3 * pytorchs.get(k, 0.0) + 4 * eps)}


def differences(o: Original, records: List[Record], reference: List[Record]) -> List[str]:
    numbers = [f"{k}: relative difference {e:.2g}" for k, e in too_far(o, records, reference).items()]
    return step.facts(reference, records) + numbers


def only_rounding(o: Original, records: List[Record], reference: List[Record], wrong: List[str]) -> List[str]:
    """Those of the differences that rounding alone does not explain."""
    far = {f"{k}: relative difference {e:.2g}": (k, e) for k, e in too_far(o, records, reference).items()}
    far |= {line: (k, 1.0) for line in wrong for k in [": ".join(line.split(": ")[:2])] if k.endswith(": generator")}
    for own in growing_spread(o):
        near = {w for w, (k, e) in far.items() if e <= 10 * own.get(k, 0.0)}
        if all(w in near for w in wrong if w in far):
            break
    return [w for w in wrong if w not in near]


def verdict(o: Original, records: List[Record]) -> List[str]:
    """What is wrong, in sentences; empty where nothing is.

    A call is right if it does what the original does in that call, or, where the original's calls differ among themselves, in a first call, or in one that TorchScript has optimised, or does not optimise. Of the state, each
    tensor by itself: what TorchScript takes for unused depends on the call. Eager PyTorch is the third judge: what it does too is right.
    """
    wrong = differences(o, records, o.records)
    if not wrong:
        return []
    left: List[str] = []
    for call in range(len(o.records)):
        here = lambda lines: [line for line in lines if line.startswith(f"call {call + 1}: ")]
        mine = here(wrong)
        if not mine:
            continue
        against = {}
        for name, reference in (("original", lambda o: o.records), ("steady", steady), ("first", first), ("repeated", repeated), ("unoptimised", unoptimised)):
            r = reference(o)
            if len(r) <= call:  # it has raised before
                against[name] = mine
                continue
            against[name] = [line for line in here(differences(o, records, r)) if not dropped(o, call, r[call], line) and not as_original(line, mine)]
            if against[name]:
                against[name] = only_rounding(o, records, r, against[name])
            if not against[name]:
                break
        if not all(against.values()):
            continue
        if all(needs_grad_as_eager(o, records, call, line) for line in mine):
            continue
        if raises_as_eager(o, mine) or raises_where_gradients_are_lost(o, call, mine):
            continue
        state = lambda lines: {line.split(": ")[1] for line in lines if by_itself(o, line)}
        never = set.intersection(*[state(lines) for lines in against.values()])
        never.discard("generator")  # after a dropout that drops none or all; what is drawn behind it is compared
        with_eager = here(differences(o, records, eager(o))) if len(eager(o)) > call else mine
        if not with_eager:
            continue
        never &= state(with_eager)
        best = min(([line for line in lines if line.split(": ")[1] not in state(lines) - never] for lines in against.values()), key=len)
        if best:
            left += mine
    if not left:
        return []
    with_eager = differences(o, records, eager(o))
    who = "eager PyTorch is with the rewritten model" if not with_eager else "eager PyTorch is with the original" if not differences(o, o.records, eager(o)) else "eager PyTorch is with neither"
    return left + [who]
