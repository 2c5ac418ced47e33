"""Is a rewritten program the same as the original? What each tolerance is, and who decides where they differ."""
import re
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch

import step
from step import Record


@dataclass
class Original:
    """What the original does; the rarer questions are asked of it when there is a difference."""

    config: dict
    source: str
    load: Callable  # a fresh original
    records: List[Record]
    eager: Callable  # a fresh eager module with the original's state
    exact: Optional[List[Record]] = None
    steady: Optional[List[Record]] = None
    eagerly: Optional[List[Record]] = None
    spread: Optional[Dict[str, float]] = None


def float64(o: Original) -> List[Record]:
    if o.exact is None:
        o.exact = step.run(o.load().double(), o.config, torch.float64)
    return o.exact


def steady(o: Original) -> List[Record]:
    """The calls, by an original that has been called four times with grad mode on: from its third call on TorchScript runs what it has optimised."""
    if o.steady is None:
        module, fresh = o.load(), o.load()
        step.run(module, {**o.config, "calls": [(train, flag, n, True) for train, flag, n, _ in o.config["calls"]]})
        with torch.no_grad():
            for (_, to), (_, value) in zip(module.state_dict().items(), fresh.state_dict().items()):
                to.copy_(value)
        modules = dict(module.named_modules())
        for name, value in step.lists_and_numbers(fresh).items():
            path, attribute = name.rsplit(".", 1)
            setattr(modules[path], attribute, value)
        o.steady = step.run(module, o.config)
    return o.steady


def eager(o: Original) -> List[Record]:
    if o.eagerly is None:
        o.eagerly = step.run(o.eager(), o.config)
    return o.eagerly


def spread(o: Original) -> Dict[str, float]:
    """How far the original's own results move when its inputs and weights move by a rounding error: a sum that is zero but for rounding, a maximum between equals."""
    if o.spread is None:
        eps = step.EPS[resolution(o)]
        o.spread = {}
        for factor in (1.0, 8.0, 64.0, 8.0):
            moved = o.load()
            generator = torch.Generator().manual_seed(int(factor))
            with torch.no_grad():
                for p in moved.parameters():
                    p.mul_((1 + eps * factor * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype))
            for k, e in step.errors(o.records, step.run(moved, o.config, noise=eps * factor)).items():
                o.spread[k] = max(o.spread.get(k, 0.0), e)
    return o.spread


# Stock takes their constants as float32 in some of its derivatives, tsmem never does: docs/troubleshooting.md.
FLOAT32_CONSTANTS = re.compile(r"[hH]ardsigmoid|[lL]eaky_?[rR]e[lL][uU]_?\(.*0\.1|[cC][eE][lL][uU]|[sS][eE][lL][uU]")


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
    ours, stocks = step.errors(exact, records), step.errors(exact, reference)
    # A tensor that has no float64 twin is held against the original.
    return {k: e for k, e in apart.items() if e > 0 and (ours.get(k, e) > 3 * stocks.get(k, 0.0) + 4 * eps)}


def differences(o: Original, records: List[Record], reference: List[Record]) -> List[str]:
    numbers = [f"{k}: relative difference {e:.2g}" for k, e in too_far(o, records, reference).items()]
    facts = step.facts(reference, records)
    for call, (train, flag, n, grad) in enumerate(o.config["calls"]):
        # A dropout with p = 0 or p = 1 under no_grad: whether the original draws depends on the calls before. Eager PyTorch does not.
        drawn = f"call {call + 1}: generator: "
        if not grad and any(f.startswith(drawn) for f in facts) and step.raised(eager(o)) is None and torch.equal(records[call]["generator"], eager(o)[call]["generator"]):
            facts = [f for f in facts if not f.startswith(drawn)]
    return facts + numbers


def only_rounding(o: Original, records: List[Record], reference: List[Record]) -> bool:
    if step.facts(reference, records):
        return False
    own = dict(spread(o))
    for other in (steady(o), eager(o)):  # constants that TorchScript's derivatives round to float32, or eager's do
        for k, e in step.errors(o.records, other).items():
            if e < 1e-6:
                own[k] = max(own.get(k, 0.0), e)
    return all(e <= 10 * own.get(k, 0.0) for k, e in too_far(o, records, reference).items())


def verdict(o: Original, records: List[Record]) -> List[str]:
    """What is wrong, in sentences; empty where nothing is."""
    wrong = differences(o, records, o.records)
    if not wrong:
        return []
    if not differences(o, records, steady(o)):
        return []
    own = differences(o, o.records, steady(o))
    eager_differs = differences(o, records, eager(o))
    if own and not eager_differs:  # stock is not the same in all its calls
        return []
    if only_rounding(o, records, o.records) or only_rounding(o, records, steady(o)):
        return []
    who = "eager PyTorch is with the rewritten model" if not eager_differs else "eager PyTorch is with the original" if not differences(o, o.records, eager(o)) else "eager PyTorch is with neither"
    return wrong + [who] + (["the original differs between its own calls"] if own else [])
