"""torch.compile(model, backend="tsmem"): Dynamo's graphs, rewritten.

Each graph becomes one of aten operators (before autograd and autocast take them apart), is rewritten as a TorchScript
model is, and runs operator by operator as eager code does. What Python alone can run (autograd.Function, checkpoint,
borders of no_grad and autocast blocks) stays as it is, and the graph on each side of it is rewritten for itself.

make_fx, fuser_utils, the switch of saved-tensor hooks and the `grapharg` of Dynamo's inputs are PyTorch's, but not public: they are used here alone.
"""
import contextlib
import json
import logging
import operator
import re
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._error import Error
from ._graph import DATA, State, build, describe, memory_of
from ._regions import put_back_regions
from ._session import call_library, read_report, split_options
from ._writes import Writes, is_in_place, memory, name_of

log = logging.getLogger("tsmem")

_AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
_INFERENCE = (torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode)
_PLANS = {"budget", "fit"}  # options that ask for a plan,
_OF_PLANS = _PLANS | {"estimate", "solve_seconds", "offload", "link"}  # and those that say how to make it
_ASKED_FOR = ("request", "budget")  # errors that the caller's options are to blame for
_NAME = re.compile(r"""\._(?:modules|parameters|buffers)\[['"]([^'"]*)['"]\]|\[['"]([^'"]*)['"]\]|\[(\d+)\]|\.(\w+)""")


def _checkpoint(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torch.utils.checkpoint has put into the graph as an operator; run by itself, that operator checkpoints nothing."""
    from torch.utils.checkpoint import checkpoint

    if (context := getattr(body, "meta", {}).get("_checkpoint_context_fn")) is not None:
        kwargs = {**kwargs, "context_fn": context}
    if kwargs.get("use_reentrant"):  # needs all tensors as arguments, and runs all of the body again
        kwargs = {**kwargs, "early_stop": False}
    # As arguments, buffers that it changes would be refused.
    return checkpoint(lambda: body(*args), **{**kwargs, "use_reentrant": False})


def _inner(gm: fx.GraphModule) -> List[fx.Node]:
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def _has_values(node: fx.Node) -> bool:
    """Whether tensors or numbers go into it or come out."""
    held = (n.meta.get("example_value", n.meta.get("val")) for n in (node, *node.all_input_nodes))
    return any(isinstance(v, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) for v in pytree.tree_leaves(list(held)))


def _of_transform(node: fx.Node) -> bool:
    """A function that torch.func's transforms (grad, vmap) have left in the graph: between their begin and end tensors wrap others."""
    return node.op == "call_function" and "functorch" in (getattr(node.target, "__module__", None) or "")


def _inside_transforms(gm: fx.GraphModule) -> List[fx.Node]:
    """What lies between begin and end of torch.func's transforms, and these."""
    inside, depth = [], 0
    for node in _inner(gm):
        if _of_transform(node):
            depth += node.target.__name__.endswith("_increment_nesting") - node.target.__name__.endswith("_decrement_nesting")
        if depth or _of_transform(node):
            inside.append(node)
    return inside


def _is_plain(node: fx.Node) -> bool:
    """An operator on tensors and numbers, and no operator on functions, none of Dynamo's own functions, and not the border of a block: what sets a
    mode (autocast, no_grad, inference_mode, the backends of attention), or puts it back, takes and gives neither."""
    if _of_transform(node):
        return False
    if node.op != "call_function":
        return node.op == "call_method"
    if isinstance(node.target, torch._ops.OpOverload) or "record_function" in str(node.target):
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.target in (torch.autograd.function.FunctionCtx, _checkpoint):
        return False
    return not (getattr(node.target, "__module__", None) or "").startswith("torch._dynamo.") and _has_values(node)


def _used_before(tensor: fx.Node, write: fx.Node) -> bool:
    return any(user < write for user in tensor.users if user.target is not DATA and _is_plain(user))


_NEW = [getattr(torch.ops.aten, form.format(what)) for what in ("zeros", "ones", "full", "empty") for form in ("{}", "new_{}", "{}_like")]


def _is_new(tensor: fx.Node) -> bool:
    """An argument, or memory that one of PyTorch's functions has just made: no other node is it, or a view of it."""
    return tensor.op == "placeholder" or getattr(tensor.target, "overloadpacket", None) in _NEW


def _drop_grad_that_sets_nothing(gm: fx.GraphModule) -> None:
    """What switches gradients on where they are on, or off where they are off: at each such border the graph would be cut, and patterns with it."""
    inside, nodes = set(_inside_transforms(gm)), _inner(gm)
    if any(n.target in _INFERENCE for n in nodes):
        return
    grad = True
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            if node not in inside and grad == bool(node.args[0]):
                gm.graph.erase_node(node)
            grad = bool(node.args[0])


def _drop_autocast_that_sets_nothing(gm: fx.GraphModule) -> None:
    """The same of blocks that set what is set: off where it is off, around rotary embeddings, or of a device that isn't there."""
    inside, nodes = set(_inside_transforms(gm)), _inner(gm)
    sets_otherwise = any(n.op == "call_function" and "set_autocast" in getattr(n.target, "__name__", "") for n in nodes)
    now: Dict[str, Tuple[bool, torch.dtype]] = {}  # whether autocast is on, by device, and the dtype that it casts to
    entered: Dict[fx.Node, Tuple[Tuple[bool, torch.dtype], bool]] = {}  # what was set before a block, and whether it sets something else
    for node in nodes:
        if node.target is _AUTOCAST[0]:
            device, dtype, enabled, keeps_casts = node.args
            before = now.setdefault(device, (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
            now[device] = (bool(enabled), dtype or before[1])
            entered[node] = (before, now[device] != before or keeps_casts is not None or node in inside or sets_otherwise)
        elif node.target is _AUTOCAST[1]:
            enter = node.args[0]
            now[enter.args[0]], sets = entered.pop(enter)
            if not sets and node not in inside:
                gm.graph.erase_node(node)
                gm.graph.erase_node(enter)


def _stays(gm: fx.GraphModule) -> Optional[str]:
    """Why all of the graph runs as it is: `x.data = y` changes what may be recomputed, which autograd is not told; of what is overwritten
    inside a transform of torch.func nobody knows whose memory it is."""
    for node in _inside_transforms(gm):
        if is_in_place(node):
            return f"{name_of(node)} overwrites a tensor inside a transform of torch.func"
    for node in _inner(gm):
        # Of `x.data = y` Dynamo makes the one in torch 2.11, the other in 2.15.
        if node.op == "call_function" and name_of(node) in ("set_", "shallow_copy_data_") and _used_before(node.args[0], node):
            return "it gives a tensor other .data after having used it"
    return None


def _refuse_written_data(aten: fx.GraphModule) -> None:
    """What overwrites x.data after x was used changes what backward keeps of x, in eager code, but not what is recomputed."""
    from_data: Dict[fx.Node, fx.Node] = {}
    for node in _inner(aten):
        if node.target is DATA:
            from_data[node] = from_data.get(node.args[0], node.args[0])
        elif isinstance(node.target, torch._ops.OpOverload):
            given = {f.name: a for f, a in zip(node.target._schema.arguments, node.args)} | node.kwargs
            for f in node.target._schema.arguments:
                for x in pytree.tree_leaves(given.get(f.name)) if f.alias_info is not None else ():
                    if not isinstance(x, fx.Node) or x not in from_data:
                        continue
                    from_data[node] = from_data[x]
                    if f.alias_info.is_write and (not _is_new(from_data[x]) or _used_before(from_data[x], node)):
                        raise Error(f"{node.target._opname} overwrites a tensor's .data after it was used")
        elif node.target is operator.getitem and node.args[0] in from_data:
            from_data[node] = from_data[node.args[0]]


def _runs(gm: fx.GraphModule) -> List[List[fx.Node]]:
    """The nodes between borders, of those parts that run with gradients, outside torch.func's transforms."""
    runs: List[List[fx.Node]] = [[]]
    odd, grad = set(_inside_transforms(gm)), True
    inference = set()  # the modes that were entered and not left
    for node in _inner(gm):
        if _is_plain(node) and node not in odd and not (node.target is operator.getitem and node.args[0] in odd):
            runs[-1].append(node)
            continue
        odd.add(node)
        if runs[-1] and (inference or not grad):
            runs.pop()
        runs.append([])
        if node.target is torch._C._set_grad_enabled:
            grad = bool(node.args[0])
        elif node.target is _INFERENCE[0] and node.args[0]:
            inference.add(node)
        elif node.target is _INFERENCE[1]:
            inference.discard(node.args[0])
    if inference or not grad:
        runs.pop()
    return [run for run in runs if run]


def _parts(gm: fx.GraphModule) -> List[Tuple[Optional[str], fx.GraphModule]]:
    """The graphs to rewrite, with the names of those that became submodules of `gm`; None: `gm` itself."""
    if all(map(_is_plain, _inner(gm))):
        return [(None, gm)]
    from torch.fx.passes.utils.fuser_utils import erase_nodes, fuse_as_graphmodule, insert_subgm

    for node in _inner(gm):
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = _checkpoint
    for node in gm.graph.nodes:
        node.meta.setdefault("val", node.meta.get("example_value"))
    runs = _runs(gm)
    writes = Writes(_inner(gm))
    overwritten = [(writes.outside(run, ever=True), writes.outside(run, ever=False)) for run in runs]
    # Not by fuse_by_partitions, which sorts (torch 2.11): writes and draws have an order that no argument shows.
    for i, (run, (ever, later)) in enumerate(zip(runs, overwritten)):
        part, inputs, outputs = fuse_as_graphmodule(gm, run, f"tsmem_{i}")
        part.overwritten_inputs = [not memory(n).isdisjoint(ever if n.op == "placeholder" else later) for n in inputs]
        part.overwritten_outputs = [not memory(n).isdisjoint(later) for n in outputs]
        if outputs:
            insert_subgm(gm, part, inputs, outputs)
            erase_nodes(gm, run)
    gm.graph.lint()
    gm.recompile()
    return [(name, child) for name, child in gm.named_children() if name.startswith("tsmem_")]


class _Interpreter(fx.Interpreter):
    """`.data` is no operator, and tracing would take its result for a constant. Traced as detach, it becomes `.data` again."""

    def call_function(self, target: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        if target is not DATA:
            return super().call_function(target, args, kwargs)
        with fx.traceback.annotate({"tsmem": "data"}):
            return args[0].detach()


def _aten_graph(gm: fx.GraphModule, fakes: List[Any]) -> fx.GraphModule:
    """The same graph in aten operators. It runs on Dynamo's own fake tensors: fresh ones would break its guards."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None)
    with mode or contextlib.nullcontext(), torch.enable_grad(), _no_hooks(), fx.traceback.preserve_node_meta():
        aten = make_fx(lambda *a: _Interpreter(gm).run(*a), pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    for node in _inner(aten):
        if node.target is torch.ops.aten.detach.default and "tsmem" in node.meta.get("custom", {}):
            node.target = DATA
    for node in aten.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(aten, node.target, None), FakeTensor):
            raise Error("a function in it makes a tensor by no operator of PyTorch's")
    _refuse_written_data(aten)
    return aten


def _dotted(source: str) -> str:
    """"L['self']._modules['layer1']._parameters['weight']" as "layer1.weight"."""
    inside = re.sub(r"""^[LG]\[['"][^'"]*['"]\]""", "", source)
    return ".".join(next(filter(None, found)) for found in _NAME.findall(inside))


def _module_of(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"@\d+", "", _dotted(stack[-1][0])).replace(",", "_") if stack else ""


class _Input:
    """What Dynamo knows of an input: its fake value, the example, and where a parameter or buffer is found."""

    def __init__(self, node: fx.Node, example: Any):
        self.fake = node.meta.get("example_value", example)
        self.example = example.node.hint if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)) else example
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        self.path = _dotted(name() if callable(name) else name)
        own = "ParamBuffer" in type(source).__name__ or "_buffers[" in str(name() if callable(name) else name)
        self.is_state = isinstance(example, torch.nn.Parameter) or isinstance(example, torch.Tensor) and own


def _state(gm: fx.GraphModule, inputs: List[Optional[_Input]], values: Sequence[Any], shared: Sequence[bool]) -> State:
    """Parameters, buffers, what shares memory with them, and constants, each under a path of its own; `values` are those of the inputs."""
    state: State = {}
    taken, around = set(), set()  # paths, and those of the modules that they are in

    def modules_of(path: str) -> List[str]:
        return [path[:i] for i, c in enumerate(path) if c == "."]

    def add(node: fx.Node, path: str, tensor: torch.Tensor) -> None:
        path = ".".join(part for part in re.sub(r"[^\w.]", "_", path).split(".") if part) or node.name
        while path in taken or path in around or not taken.isdisjoint(modules_of(path)):
            path += "_"
        taken.add(path)
        around.update(modules_of(path))
        state[node.name] = (path, tensor)

    for node, given, value, is_shared in zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, values, shared):
        if is_shared:
            add(node, given.path if given is not None else node.name, value)
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(gm, node.target, None), torch.Tensor):
            add(node, node.name, getattr(gm, node.target))
    return state


def _drop_casts(gm: fx.GraphModule) -> None:
    """x.to(x's own dtype) is x, which hides what x is from the patterns."""
    for node in _inner(gm):
        if node.target is torch.ops.aten.to.dtype and not any(node.args[2:]) and not node.kwargs:
            val = node.args[0].meta.get("val")
            if isinstance(val, torch.Tensor) and val.dtype == node.args[1]:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)


def _drop_what_does_nothing(gm: fx.GraphModule) -> None:
    """Asserts, and what tracing does to a copy of torch.tensor([...]): to the patterns it is a write."""
    for node in _inner(gm):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
        elif node.target is torch.ops.aten.detach_.default and node.args[0].target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _sharing(values: Sequence[Any], state_at: Sequence[int]) -> Tuple[int, ...]:
    """Which parameters and buffers share memory, and which other inputs with them: those have the same number. All else has -1."""
    at = [memory_of(v) if isinstance(v, torch.Tensor) else None for v in values]
    numbers: Dict[Any, int] = {}
    for i in state_at:
        numbers.setdefault(at[i], len(numbers))
    return tuple(numbers.get(place, -1) for place in at)


def _note_overwritten(aten: fx.GraphModule, part: fx.GraphModule) -> None:
    """Tells `describe` what the rest of the graph overwrites."""
    inputs = [n for n in aten.graph.nodes if n.op == "placeholder"]
    outputs = pytree.tree_leaves(aten.graph.output_node().args)
    for nodes, written in ((inputs, getattr(part, "overwritten_inputs", [])), (outputs, getattr(part, "overwritten_outputs", []))):
        for node, is_written in zip(nodes, written):
            if is_written and isinstance(node, fx.Node):
                node.meta["overwritten"] = True


def _no_hooks() -> ContextManager[None]:
    """The caller's saved-tensor hooks are for what runs, and not for what is traced or measured: torch.utils.checkpoint counts."""
    return torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing()


class _Rewritten(torch.nn.Module):
    """A graph in the place of `original`. What may move past a write hangs on which parameters and buffers share memory, with one another
    and with other inputs. Dynamo guards on no such thing, so each call asks, and there is one rewritten graph for each answer.

    A plan runs the graph. A part of a graph (`is_part`) may begin with values of another part: then it is planned at its first call."""

    def __init__(self, original: fx.GraphModule, inputs: Dict[str, _Input], is_part: bool, casts_stay: bool, strict: bool, options: Dict[str, Any]):
        super().__init__()
        placeholders = [n for n in original.graph.nodes if n.op == "placeholder"]
        self.known = [inputs.get(n.name) for n in placeholders]
        fakes = [k.fake if k is not None else n.meta["val"] for k, n in zip(self.known, placeholders)]
        self.aten = _aten_graph(original, fakes)
        for node, fake in zip((n for n in self.aten.graph.nodes if n.op == "placeholder"), fakes):
            node.meta["val"] = fake
        _note_overwritten(self.aten, original)
        _drop_what_does_nothing(self.aten)
        if not casts_stay:
            _drop_casts(self.aten)
        self.options, self.strict, self.is_part = options, strict, is_part
        self.state_at = [i for i, k in enumerate(self.known) if k is not None and k.is_state]
        self.graphs: Dict[Tuple[int, ...], Callable[..., Any]] = {}
        self.said = ""
        self.fell_short = False  # of a plan that was asked for, or to be rewritten at all
        examples = [None if k is None else k.example for k in self.known]
        sharing = _sharing(examples, self.state_at)
        if _PLANS & options.keys() and None in self.known:
            self.rewritten(examples, sharing, planned=False)  # so that what can't be done is told now
            self.said = "is planned at its first call"
        else:
            self.graphs[sharing] = self.rewritten(examples, sharing)

    def rewritten(self, values: Sequence[Any], sharing: Tuple[int, ...], planned: bool = True) -> Callable[..., Any]:
        shared = [number >= 0 for number in sharing]
        state = _state(self.aten, self.known, values, shared)
        description = describe(self.aten, state, _module_of)
        tensors = [t for _, t in state.values()]
        examples = tuple(v for v, s in zip(values, shared) if not s)
        unplanned = {name: value for name, value in self.options.items() if name not in _OF_PLANS}

        def report(examples: Any, options: Dict[str, Any]) -> Dict[str, Any]:
            with _no_hooks():
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
        return build(new, self.aten).forward

    def forward(self, *values: Any) -> Any:
        sharing = _sharing(values, self.state_at)
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
        log.log(_level(self.fell_short), "tsmem: graph of %d operators, %s: %s", len(_inner(self.aten)), why, self.said)
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


def compile_graph(gm: fx.GraphModule, examples: List[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend: takes Dynamo's graph and its inputs, returns what runs in its place.

    Options (torch.compile's `options`): those of tsmem.rewrite that mean something here (level, only, skip, module, patterns, budget,
    estimate, solve_seconds, offload, link, seed), and strict=True, which raises tsmem.Error where a graph would else run as it is.
    """
    options = dict(kwargs.get("options") or {})
    strict = options.pop("strict", False)
    if no := [name for name in ("input", "device") if name in options]:
        raise Error(f"{no[0]} is not for torch.compile, whose first call brings its own: leave it out.", "request")
    if kwargs.get("mode") not in (None, "default"):
        raise Error(f"torch.compile's mode={kwargs['mode']!r} is not for this backend; use options.", "request")
    if not torch.is_grad_enabled():
        return gm.forward  # nothing is saved
    put_back_regions(gm)
    _drop_grad_that_sets_nothing(gm)
    _drop_autocast_that_sets_nothing(gm)
    gm.recompile()
    reason = _stays(gm)
    casts_stay = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or any(n.target in _AUTOCAST for n in gm.graph.nodes)
    inputs = {n.name: _Input(n, e) for n, e in zip((n for n in gm.graph.nodes if n.op == "placeholder"), examples)}
    parts = [] if reason else _parts(gm)
    said = [f"{reason}, so it runs as it is"] if reason else []
    failed: Optional[Exception] = Error(said[0], "request") if reason else None
    fell_short = False
    elsewhere = []  # that no module of a part has the path that was asked for: another part or graph may
    whole: Any = gm
    for name, child in parts:
        try:
            new = _Rewritten(child, inputs, name is not None, casts_stay, strict, options)
        except Exception as error:  # noqa: BLE001  (whatever can't be rewritten runs as it did)
            about = getattr(error, "about", "")
            if about == "modules":
                elsewhere.append(error)
                continue
            if isinstance(error, Error) and error.kind in _ASKED_FOR:
                raise
            failed = error
            # Tracing tensors that wrap others (DTensor) ends in any error of theirs.
            wraps = sorted({type(e).__name__ for e in examples if is_traceable_wrapper_subclass(e)})
            why = f"it works on {' and '.join(wraps)}, which wraps other tensors" if wraps and not isinstance(error, Error) else _sentence(error)
            said.append(f"runs as it is: {why}")
            continue
        said.append(new.said)
        fell_short = fell_short or new.fell_short
        if name is None:
            whole = new
        else:
            setattr(gm, name, new)
    if elsewhere and len(elsewhere) == len(parts):
        failed = elsewhere[0]
        said.append(f"runs as it is: {_sentence(failed)}")
    for given in inputs.values():
        given.example = None  # the first call's tensors are not held
    if failed is not None and strict:
        raise Error(f"a graph can't be rewritten: {said[-1]}", getattr(failed, "kind", "input")) from failed
    _tell_graph_breaks()
    log.log(_level(fell_short or failed is not None), "tsmem: graph of %d operators: %s", len(_inner(gm)), " | ".join(said) or "nothing to rewrite")
    return whole.forward
