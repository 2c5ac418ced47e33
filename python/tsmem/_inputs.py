"""What is known of the inputs of Dynamo's graph: which are parameters and buffers, under what names, and which share memory."""
import re
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import fx

from ._graph import State, memory_of

_NAME = re.compile(r"""\._(?:modules|parameters|buffers)\[['"]([^'"]*)['"]\]|\[['"]([^'"]*)['"]\]|\[(\d+)\]|\.(\w+)""")


def _dotted(source: str) -> str:
    """"L['self']._modules['layer1']._parameters['weight']" as "layer1.weight"."""
    inside = re.sub(r"""^[LG]\[['"][^'"]*['"]\]""", "", source)
    return ".".join(next(filter(None, found)) for found in _NAME.findall(inside))


def module_of(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"@\d+", "", _dotted(stack[-1][0])).replace(",", "_") if stack else ""


class Input:
    """What Dynamo knows of an input: its fake value, the example, and where a parameter or buffer is found."""

    def __init__(self, node: fx.Node, example: Any):
        self.fake = node.meta.get("example_value", example)
        self.example = example.node.hint if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)) else example
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        self.path = _dotted(name() if callable(name) else name)
        own = "ParamBuffer" in type(source).__name__ or "_buffers[" in str(name() if callable(name) else name)
        self.is_state = isinstance(example, torch.nn.Parameter) or isinstance(example, torch.Tensor) and own


def state_of(gm: fx.GraphModule, inputs: List[Optional[Input]], values: Sequence[Any], shared: Sequence[bool]) -> State:
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


def sharing_of(values: Sequence[Any], state_at: Sequence[int]) -> Tuple[int, ...]:
    """Which parameters and buffers share memory, and which other inputs with them: those have the same number. All else has -1."""
    at = [memory_of(v) if isinstance(v, torch.Tensor) else None for v in values]
    numbers: Dict[Any, int] = {}
    for i in state_at:
        numbers.setdefault(at[i], len(numbers))
    return tuple(numbers.get(place, -1) for place in at)
