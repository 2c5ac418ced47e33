"""A program's eager module through torch.compile(backend="tsmem"), against the module itself."""
import pathlib
import sys
from typing import Callable, Dict, List, Tuple

import torch

import judge
import step

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What one graph recomputes from and another overwrites: docs/eager.md.
OVERWRITTEN = "a source of a recomputed tensor was changed in place"


def backend(graph, examples):
    sys.path[:0] = [path for path in [str(ROOT / "python")] if path not in sys.path]
    from tsmem import _dynamo

    return _dynamo.compile_graph(graph, examples, options={"strict": True})


def run(make: Callable, config: dict, states: List[step.Record], backend: Callable) -> Tuple[List[step.Record], int]:
    """The records of the compiled module's calls, and how many graphs Dynamo made of it."""
    graphs = 0

    def counting(graph, examples):
        nonlocal graphs
        graphs += 1
        return backend(graph, examples)

    torch._dynamo.reset()
    module = make()
    compiled = torch.compile(getattr(module, config["method"]), backend=counting)
    object.__setattr__(module, config["method"], compiled)  # not a child of it
    with torch._dynamo.config.patch(allow_rnn=True, recompile_limit=64):
        return step.run(module, config, states=states), graphs


def wrong(config: dict, source: str, make: Callable, backend: Callable = backend) -> List[str]:
    """What is wrong, in sentences; `make` gives a fresh module. What Dynamo itself does otherwise than eager PyTorch is not wrong."""
    states: List[step.Record] = []
    original = judge.Original(config, source, make, make, states, step.run(make(), config, keep=states))
    if step.raised(original.records):
        return []
    records, graphs = run(make, config, states, backend)
    if graphs > 1 and OVERWRITTEN in (step.raised(records) or ""):
        return []
    found = judge.verdict(original, records)
    if not found:
        return []
    by_dynamo, _ = run(make, config, states, lambda graph, examples: graph.forward)
    own = sizes(judge.verdict(original, by_dynamo))
    return [] if all(size <= 10 * own.get(what, -1) for what, size in sizes(found).items()) else found


def sizes(lines: List[str]) -> Dict[str, float]:
    """What is wrong, and by how much; 0 where it is no number."""
    split = [line.partition(": relative difference ") for line in lines]
    return {what: float(number or 0) for what, _, number in split}
