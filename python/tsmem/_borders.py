"""The borders in Dynamo's graph: what no operator of PyTorch's is, and what sets a mode for what follows.

Nothing is rewritten across one. A border that sets what is set already is taken out.
"""
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
INFERENCE = (torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode)


def run_checkpoint(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torch.utils.checkpoint has put into the graph as an operator; run by itself, that operator checkpoints nothing."""
    from torch.utils.checkpoint import checkpoint

    if (context := getattr(body, "meta", {}).get("_checkpoint_context_fn")) is not None:
        kwargs = {**kwargs, "context_fn": context}
    if kwargs.get("use_reentrant"):  # needs all tensors as arguments, and runs all of the body again
        kwargs = {**kwargs, "early_stop": False}
    # As arguments, buffers that it changes would be refused.
    return checkpoint(lambda: body(*args), **{**kwargs, "use_reentrant": False})


def inner(gm: fx.GraphModule) -> List[fx.Node]:
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def _has_values(node: fx.Node) -> bool:
    """Whether tensors or numbers go into it or come out."""
    held = (n.meta.get("example_value", n.meta.get("val")) for n in (node, *node.all_input_nodes))
    return any(isinstance(v, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) for v in pytree.tree_leaves(list(held)))


def _of_transform(node: fx.Node) -> bool:
    """A function that torch.func's transforms (grad, vmap) have left in the graph: between their begin and end tensors wrap others."""
    return node.op == "call_function" and "functorch" in (getattr(node.target, "__module__", None) or "")


def inside_transforms(gm: fx.GraphModule) -> List[fx.Node]:
    """What lies between begin and end of torch.func's transforms, and these."""
    inside, depth = [], 0
    for node in inner(gm):
        if _of_transform(node):
            depth += node.target.__name__.endswith("_increment_nesting") - node.target.__name__.endswith("_decrement_nesting")
        if depth or _of_transform(node):
            inside.append(node)
    return inside


def is_plain(node: fx.Node) -> bool:
    """An operator on tensors and numbers, and no operator on functions, none of Dynamo's own functions, and not the border of a block: what sets a
    mode (autocast, no_grad, inference_mode, the backends of attention), or puts it back, takes and gives neither."""
    if _of_transform(node):
        return False
    if node.op != "call_function":
        return node.op == "call_method"
    if isinstance(node.target, torch._ops.OpOverload) or "record_function" in str(node.target):
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.target in (torch.autograd.function.FunctionCtx, run_checkpoint):
        return False
    return not (getattr(node.target, "__module__", None) or "").startswith("torch._dynamo.") and _has_values(node)


def drop_grad_that_sets_nothing(gm: fx.GraphModule) -> None:
    """What switches gradients on where they are on, or off where they are off: at each such border the graph would be cut, and patterns with it."""
    inside, nodes = set(inside_transforms(gm)), inner(gm)
    if any(n.target in INFERENCE for n in nodes):
        return
    grad = True
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            if node not in inside and grad == bool(node.args[0]):
                gm.graph.erase_node(node)
            grad = bool(node.args[0])


def drop_autocast_that_sets_nothing(gm: fx.GraphModule) -> None:
    """The same of blocks that set what is set: off where it is off, around rotary embeddings, or of a device that isn't there."""
    inside, nodes = set(inside_transforms(gm)), inner(gm)
    sets_otherwise = any(n.op == "call_function" and "set_autocast" in getattr(n.target, "__name__", "") for n in nodes)
    now: Dict[str, Tuple[bool, torch.dtype]] = {}  # whether autocast is on, by device, and the dtype that it casts to
    entered: Dict[fx.Node, Tuple[Tuple[bool, torch.dtype], bool]] = {}  # what was set before a block, and whether it sets something else
    for node in nodes:
        if node.target is AUTOCAST[0]:
            device, dtype, enabled, keeps_casts = node.args
            before = now.setdefault(device, (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
            now[device] = (bool(enabled), dtype or before[1])
            entered[node] = (before, now[device] != before or keeps_casts is not None or node in inside or sets_otherwise)
        elif node.target is AUTOCAST[1]:
            enter = node.args[0]
            now[enter.args[0]], sets = entered.pop(enter)
            if not sets and node not in inside:
                gm.graph.erase_node(node)
                gm.graph.erase_node(enter)
