"""Operators of other libraries and autograd.Functions: what they keep for their backward is not kept where tsmem can make it again.

A recipe (tsmem::_recipe_of) is kept in its place: for an operator by the hooks of what its node has saved, for a function by its graphs.
"""
from collections import Counter
from typing import Any, Callable, List, NamedTuple, Tuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._borders import inside_transforms
from ._graph import memory_of
from ._writes import memory, overwritten

_OURS = ("aten", "prim", "prims", "tsmem")


def _place(t: torch.Tensor) -> Tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


def _in_a_graph(values: Any) -> List[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and t.grad_fn is not None]


def _is_plain(t: Any) -> bool:
    return type(t) is torch.Tensor and t.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _run(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    results = operator(*args, **kwargs)
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return results  # the caller's hooks (torch.utils.checkpoint counts) have what is saved
    given = _in_a_graph([args, kwargs])
    node = next((t.grad_fn for t in _in_a_graph(results)), None)
    # Of what an operator written in C++ saves Python is shown nothing.
    saved = getattr(node, "_raw_saved_tensors", ())
    if not saved or any(t.grad_fn is node for t in given):
        return results
    operands = {_place(t): t for t in given if _is_plain(t)}
    values = [value if _is_plain(value) else None for value in node.saved_tensors]
    places = Counter(memory_of(value) for value in values if value is not None)
    for value, kept in zip(values, saved):
        # What is kept twice, or beside a view of it, would be made twice, or be there anyway.
        operand = operands.get(_place(value)) if value is not None and places[memory_of(value)] == 1 else None
        recipe = torch.ops.tsmem._recipe_of(operand) if operand is not None else None
        if recipe is not None:
            kept.register_hooks(lambda _, recipe=recipe: recipe, torch.ops.tsmem._make_from)
    return results


def keep_recipes_for_operators(gm: fx.GraphModule) -> None:
    """Of what overwrites its arguments nothing is known: it stays as it is."""
    for node in gm.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in _OURS and not target._schema.is_mutable:
            node.target, node.args = _run, (target, *node.args)
    gm.recompile()


class _Recipe(NamedTuple):
    """Stands where a tensor is kept, beside tensors that are kept themselves."""

    tensor: torch.Tensor


def _kept(t: Any) -> Any:
    recipe = torch.ops.tsmem._recipe_of(t) if _is_plain(t) and t.grad_fn is not None else None
    return t if recipe is None else _Recipe(recipe)


def _made(kept: Any) -> Any:
    return torch.ops.tsmem._make_from(kept.tensor, True) if isinstance(kept, _Recipe) else kept


def _may_overwrite(body: fx.GraphModule) -> bool:
    """What an operator on functions, or a kernel of Triton's, does with its arguments nobody says here."""
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) or any(overwritten(node)) for node in body.graph.nodes)


def _arguments_kept_once(results: Any, saved: Any, by_save_for_backward: Any) -> List[int]:
    """Where among what is saved: an argument by itself. An attribute of ctx is read as it is by then, so that what was written to it since counts."""
    places = Counter(place for value in saved if isinstance(value, fx.Node) for place in memory(value))
    given = set(pytree.tree_leaves(results))
    return [at for at in by_save_for_backward
            if isinstance(saved[at], fx.Node) and saved[at].op == "placeholder" and saved[at] not in given and all(places[place] == 1 for place in memory(saved[at]))]


def keep_recipes_for_functions(gm: fx.GraphModule) -> None:
    """Dynamo makes two graphs of an autograd.Function. What the first gives besides its results is what the second begins with, behind the gradients."""
    done, odd = set(), set(inside_transforms(gm))
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
        forward, backward = (getattr(gm, body.target) for body in call.args[:2])
        if call in odd or forward in done or _may_overwrite(forward):
            continue
        done.add(forward)
        output = forward.graph.output_node()
        results, saved = output.args[0]
        begins, kept = backward.graph.find_nodes(op="placeholder")[-len(saved):], list(saved)
        for at in _arguments_kept_once(results, saved, call.kwargs.get("saved_for_backward_idx", ())):
            if not begins[at].users:
                continue
            with forward.graph.inserting_before(output):
                kept[at] = forward.graph.call_function(_kept, (saved[at],))
            with backward.graph.inserting_before(min(begins[at].users)):
                made = backward.graph.call_function(_made, (begins[at],))
            begins[at].replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
        output.args = ((results, type(saved)(kept)),)
        forward.recompile()
        backward.recompile()
