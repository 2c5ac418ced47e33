"""What a part of Dynamo's graph has in common with what the rest of the graph overwrites: it must not be read again in backward."""
import inspect
import re
from typing import Any, Iterable, Iterator, List, Set

import torch
from torch import fx
from torch.utils import _pytree as pytree

_IN_PLACE = re.compile(r"[a-z].*[^_]_|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift|concat)|setitem")


def _nodes(values: Any) -> List[fx.Node]:
    return [a for a in pytree.tree_leaves(values) if isinstance(a, fx.Node)]


def _body(node: fx.Node) -> Any:
    """The graph that an operator on functions is given."""
    return getattr(node.graph.owning_module, node.target, None) if node.op == "get_attr" else None


def name_of(node: fx.Node) -> str:
    """A function's or method's name, without an overload's."""
    return (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).split(".")[0]


def is_in_place(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if _IN_PLACE.fullmatch(name_of(node)):
        return True
    if inspect.isfunction(node.target):  # of torch.nn.functional
        try:
            return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace"))
        except (TypeError, ValueError):
            pass
    return bool(node.kwargs.get("inplace"))


def _schemas(target: Any) -> List[Any]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, overload)._schema for overload in target.overloads()]
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else []


def overwritten(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a node overwrites: by the schema of an operator (a custom one may have any name), and by the names of Python's functions."""
    if is_in_place(node):
        yield from _nodes(node.args[:1] or [node.kwargs.get("input"), node.kwargs.get("self")])
    for schema in _schemas(node.target):
        for at, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _nodes([node.args[at : at + 1], node.kwargs.get(argument.name)])
    yield from _nodes(node.kwargs.get("out"))
    given = _nodes(node.args)
    rest = [a for a in given if not isinstance(_body(a), fx.GraphModule)]
    for body in (_body(a) for a in given):
        if isinstance(body, fx.GraphModule):
            formals = [n for n in body.graph.nodes if n.op == "placeholder"]
            inside = {x for n in body.graph.nodes for x in overwritten(n)}
            yield from rest if len(formals) != len(rest) and inside else (a for a, f in zip(rest, formals) if f in inside)


def memory(node: fx.Node) -> Set[int]:
    value = node.meta.get("example_value", node.meta.get("val"))
    try:
        return {value.untyped_storage()._cdata} if isinstance(value, torch.Tensor) else set()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses that wrap others
        return set()


class Writes:
    """Every write of a graph."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.all = [(node, {m for x in overwritten(node) for m in memory(x)}) for node in nodes]

    def outside(self, run: List[fx.Node], ever: bool) -> Set[int]:
        """The memory that others than `run` overwrite: after it, or `ever`, as what outlives a call may be by another call."""
        inside = set(run)
        return {m for node, written in self.all for m in written if node not in inside and (ever or run[-1] < node)}
