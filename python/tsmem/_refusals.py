"""Graphs that run as they are: autograd is not told of what is written to a tensor's .data, and would make its values again from the new ones; and
what autocast casts on devices other than the CPU and CUDA is not known here."""
import operator
from typing import Dict, Optional

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._borders import AUTOCAST, inner, inside_transforms, is_plain
from ._error import Error
from ._graph import DATA
from ._writes import name_of, overwritten


def _used_before(tensor: fx.Node, write: fx.Node) -> bool:
    return any(user < write for user in tensor.users if user.target is not DATA and is_plain(user))


_NEW = [getattr(torch.ops.aten, form.format(what)) for what in ("zeros", "ones", "full", "empty") for form in ("{}", "new_{}", "{}_like")]


def _is_new(tensor: fx.Node) -> bool:
    """An argument, or memory that one of PyTorch's functions has just made: no other node is it, or a view of it."""
    return tensor.op == "placeholder" or getattr(tensor.target, "overloadpacket", None) in _NEW


def _autocast_elsewhere(gm: fx.GraphModule) -> Optional[str]:
    """The device other than these two that autocast is on for, around the graph or in it."""
    others = ("xpu", "hpu", "mps", torch._C._get_privateuse1_backend_name())
    entered = [n.args[0] for n in inner(gm) if n.target is AUTOCAST[0]]
    return next((d for d in others if d in entered or torch.is_autocast_enabled(d)), None)


def why_it_stays(gm: fx.GraphModule) -> Optional[str]:
    """Why all of the graph runs as it is: `x.data = y` changes what may be recomputed, which autograd is not told; of what is overwritten
    inside a transform of torch.func nobody knows whose memory it is; and autocast has lists of its own for each device."""
    if device := _autocast_elsewhere(gm):
        return f"autocast is on for {device}, and tsmem knows that of the CPU and of CUDA alone"
    for node in inside_transforms(gm):
        if any(overwritten(node)):
            return f"{name_of(node)} overwrites a tensor inside a transform of torch.func"
    for node in inner(gm):
        # Of `x.data = y` Dynamo makes the one in torch 2.11, the other in 2.15.
        if node.op == "call_function" and name_of(node) in ("set_", "shallow_copy_data_") and _used_before(node.args[0], node):
            return "it gives a tensor other .data after having used it"
    return None


def refuse_written_data(aten: fx.GraphModule) -> None:
    """What overwrites x.data after x was used changes what backward keeps of x, in eager code, but not what is recomputed."""
    from_data: Dict[fx.Node, fx.Node] = {}
    for node in inner(aten):
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
