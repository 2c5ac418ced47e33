"""torch.compile(model, backend="tsmem"): Dynamo's graphs, rewritten.

Each graph becomes one of aten operators (before autograd and autocast take them apart), is rewritten as a TorchScript
model is, and runs operator by operator as eager code does. What Python alone can run (autograd.Function, checkpoint,
borders of no_grad and autocast blocks) stays as it is, and the graph on each side of it is rewritten for itself.

Of what is PyTorch's but not public, make_fx and the switch of saved-tensor hooks are used in _aten.py, fuser_utils in _parts.py, and the `grapharg` of
Dynamo's inputs in _inputs.py.
"""
import json
import logging
import re
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._aten import aten_graph, no_hooks
from ._borders import AUTOCAST, drop_autocast_that_sets_nothing, drop_grad_that_sets_nothing, inner
from ._error import Error
from ._graph import build, describe
from ._inputs import Input, module_of, sharing_of, state_of
from ._others import keep_recipes_for_operators
from ._parts import parts
from ._refusals import why_it_stays
from ._regions import put_back_regions
from ._session import call_library, read_report, split_options

log = logging.getLogger("tsmem")

_PLANS = {"budget", "fit"}  # options that ask for a plan,
_OF_PLANS = _PLANS | {"estimate", "solve_seconds", "offload", "link"}  # and those that say how to make it
_ASKED_FOR = ("request", "budget")  # errors that the caller's options are to blame for


class _Rewritten(torch.nn.Module):
    """A graph in the place of `original`. What may move past a write hangs on which parameters and buffers share memory, with one another
    and with other inputs. Dynamo guards on no such thing, so each call asks, and there is one rewritten graph for each answer.

    A plan runs the graph. A part of a graph (`is_part`) may begin with values of another part: then it is planned at its first call."""

    def __init__(self, original: fx.GraphModule, inputs: Dict[str, Input], is_part: bool, casts_stay: bool, strict: bool, options: Dict[str, Any]):
        super().__init__()
        placeholders = [n for n in original.graph.nodes if n.op == "placeholder"]
        self.known = [inputs.get(n.name) for n in placeholders]
        fakes = [k.fake if k is not None else n.meta["val"] for k, n in zip(self.known, placeholders)]
        self.aten = aten_graph(original, fakes, casts_stay)
        self.options, self.strict, self.is_part = options, strict, is_part
        self.state_at = [i for i, k in enumerate(self.known) if k is not None and k.is_state]
        self.graphs: Dict[Tuple[int, ...], Callable[..., Any]] = {}
        self.said = ""
        self.fell_short = False  # of a plan that was asked for, or to be rewritten at all
        examples = [None if k is None else k.example for k in self.known]
        sharing = sharing_of(examples, self.state_at)
        if _PLANS & options.keys() and None in self.known:
            self.rewritten(examples, sharing, planned=False)  # so that what can't be done is told now
            self.said = "is planned at its first call"
        else:
            self.graphs[sharing] = self.rewritten(examples, sharing)

    def rewritten(self, values: Sequence[Any], sharing: Tuple[int, ...], planned: bool = True) -> Callable[..., Any]:
        shared = [number >= 0 for number in sharing]
        state = state_of(self.aten, self.known, values, shared)
        description = describe(self.aten, state, module_of)
        tensors = [t for _, t in state.values()]
        examples = tuple(v for v, s in zip(values, shared) if not s)
        unplanned = {name: value for name, value in self.options.items() if name not in _OF_PLANS}

        def report(examples: Any, options: Dict[str, Any]) -> Dict[str, Any]:
            with no_hooks():
                return read_report(call_library("rewrite_graph", json.dumps(description), tensors, examples, split_options(options)[1]))

        without = ""
        try:
            made = report(examples, self.options) if planned and _PLANS & self.options.keys() else report(None, self.options if planned else unplanned)
        except Error as error:
            # Beside a graph break or a border may lie a graph of a few bytes, of which no plan saves any.
            if error.about != "budget" or (self.strict and not self.is_part):
                raise
            without = f"without a plan: {_sentence(error)}"
            made = report(None, unplanned)
        self.said = " | ".join(filter(None, (without, _found(made))))
        self.fell_short = bool(without) and not self.is_part
        new = made.pop("graph_module")
        new["original"] = description["graph"]
        graph = build(new, self.aten)
        keep_recipes_for_operators(graph)
        return graph.forward

    def forward(self, *values: Any) -> Any:
        sharing = sharing_of(values, self.state_at)
        run = self.graphs.get(sharing)
        if run is None:
            run = self.graphs[sharing] = self.rewritten_at_a_call(values, sharing)
        return run(*values)

    def rewritten_at_a_call(self, values: Sequence[Any], sharing: Tuple[int, ...]) -> Callable[..., Any]:
        why = "parameters or buffers share memory otherwise than before" if self.graphs else "planned at its first call"
        run = self.aten.forward
        try:
            run = self.rewritten(values, sharing)
        except Exception as error:  # noqa: BLE001  (it runs as it did)
            if self.strict:
                raise Error(f"a graph can't be rewritten: {_sentence(error)}", getattr(error, "kind", "input")) from error
            if not self.graphs and isinstance(error, Error) and error.kind in _ASKED_FOR:
                raise
            self.said, self.fell_short = f"runs as it is: {_sentence(error)}", True
        log.log(_level(self.fell_short), "tsmem: graph of %d operators, %s: %s", len(inner(self.aten)), why, self.said)
        return run


def _level(fell_short: bool) -> int:
    return logging.WARNING if fell_short else logging.INFO


def _sentence(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _found(report: Dict[str, Any]) -> str:
    matches = report["matches"]
    kinds: Dict[str, int] = {}
    for match in matches:
        kinds[match["pattern"]] = kinds.get(match["pattern"], 0) + 1
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1])) or "no match"
    reasons = sorted({f"{r['pattern']}: {r['reason']}" for r in report.get("refused", [])})
    left = f"; left as it is: {'; '.join(reasons[:3])}{f' and {len(reasons) - 3} more' if len(reasons) > 3 else ''}" if reasons else ""
    return f"{found}{left}"


_TOLD: Set[str] = set()  # graph breaks that the log has


def _tell_graph_breaks() -> None:
    """What Dynamo can't trace it leaves to eager mode without a word: no graph shows it. Dynamo counts its reasons, each of which is told once."""
    for reason in torch._dynamo.utils.counters["graph_break"]:
        paragraphs = re.findall(r"^ *(?:Explanation|Hint): (.*)", reason, re.MULTILINE)[:2] or reason.splitlines()[:1]
        why = " ".join(paragraphs)
        if why and why not in _TOLD:
            _TOLD.add(why)
            log.warning("tsmem: a graph break: the call at which Dynamo stops stays eager and keeps what it kept. %s", why)


def _asked_for(kwargs: Dict[str, Any]) -> Tuple[Dict[str, Any], bool]:
    """The options of each graph, and whether `strict` was asked for."""
    options = dict(kwargs.get("options") or {})
    strict = options.pop("strict", False)
    if no := [name for name in ("input", "device") if name in options]:
        raise Error(f"{no[0]} is not for torch.compile, whose first call brings its own: leave it out.", "request")
    if kwargs.get("mode") not in (None, "default"):
        raise Error(f"torch.compile's mode={kwargs['mode']!r} is not for this backend; use options.", "request")
    return options, strict


def _why_not(error: Exception, examples: List[Any]) -> str:
    # Tracing tensors that wrap others (DTensor) ends in any error of theirs.
    wraps = sorted({type(e).__name__ for e in examples if is_traceable_wrapper_subclass(e)})
    why = f"it works on {' and '.join(wraps)}, which wraps other tensors" if wraps and not isinstance(error, Error) else _sentence(error)
    return f"runs as it is: {why}"


def compile_graph(gm: fx.GraphModule, examples: List[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend: takes Dynamo's graph and its inputs, returns what runs in its place.

    Options (torch.compile's `options`): those of tsmem.rewrite that mean something here (level, only, skip, module, patterns, budget,
    estimate, solve_seconds, offload, link, seed), and strict=True, which raises tsmem.Error where a graph would else run as it is.
    """
    options, strict = _asked_for(kwargs)
    if not torch.is_grad_enabled():
        return gm.forward  # nothing is saved
    put_back_regions(gm)
    drop_grad_that_sets_nothing(gm)
    drop_autocast_that_sets_nothing(gm)
    gm.recompile()
    reason = why_it_stays(gm)
    casts_stay = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or any(n.target in AUTOCAST for n in gm.graph.nodes)
    inputs = {n.name: Input(n, e) for n, e in zip(gm.graph.find_nodes(op="placeholder"), examples)}
    to_rewrite = [] if reason else parts(gm)
    said = [f"{reason}, so it runs as it is"] if reason else []
    failed: Optional[Exception] = Error(said[0], "request") if reason else None
    fell_short = False
    elsewhere = []  # that no module of a part has the path that was asked for: another part or graph may
    whole: Any = gm
    for name, part in to_rewrite:
        try:
            new = _Rewritten(part, inputs, name is not None, casts_stay, strict, options)
        except Exception as error:  # noqa: BLE001  (whatever can't be rewritten runs as it did)
            if getattr(error, "about", "") == "modules":
                elsewhere.append(error)
                continue
            if isinstance(error, Error) and error.kind in _ASKED_FOR:
                raise
            failed = error
            said.append(_why_not(error, examples))
            continue
        said.append(new.said)
        fell_short = fell_short or new.fell_short
        if name is None:
            whole = new
        else:
            setattr(gm, name, new)
    if elsewhere and len(elsewhere) == len(to_rewrite):
        failed = elsewhere[0]
        said.append(f"runs as it is: {_sentence(failed)}")
    for given in inputs.values():
        given.example = None  # the first call's tensors are not held
    if failed is not None and strict:
        raise Error(f"a graph can't be rewritten: {said[-1]}", getattr(failed, "kind", "input")) from failed
    _tell_graph_breaks()
    log.log(_level(fell_short or failed is not None), "tsmem: graph of %d operators: %s", len(inner(gm)), " | ".join(said) or "nothing to rewrite")
    return whole.forward
