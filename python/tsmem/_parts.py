"""Dynamo's graph, cut at its borders into the graphs that can be rewritten."""
import operator
from typing import List, Optional, Tuple

import torch
from torch import fx

from ._borders import INFERENCE, inner, inside_transforms, is_plain, run_checkpoint
from ._others import keep_recipes_for_functions
from ._writes import Writes, memory


def _runs(gm: fx.GraphModule) -> List[List[fx.Node]]:
    """The nodes between borders, of those parts that run with gradients, outside torch.func's transforms."""
    runs: List[List[fx.Node]] = [[]]
    odd, grad = set(inside_transforms(gm)), True
    inference = set()  # the modes that were entered and not left
    for node in inner(gm):
        if is_plain(node) and node not in odd and not (node.target is operator.getitem and node.args[0] in odd):
            runs[-1].append(node)
            continue
        odd.add(node)
        if runs[-1] and (inference or not grad):
            runs.pop()
        runs.append([])
        if node.target is torch._C._set_grad_enabled:
            grad = bool(node.args[0])
        elif node.target is INFERENCE[0] and node.args[0]:
            inference.add(node)
        elif node.target is INFERENCE[1]:
            inference.discard(node.args[0])
    if inference or not grad:
        runs.pop()
    return [run for run in runs if run]


def parts(gm: fx.GraphModule) -> List[Tuple[Optional[str], fx.GraphModule]]:
    """The graphs to rewrite, with the names of those that became submodules of `gm`; None: `gm` itself."""
    if all(map(is_plain, inner(gm))):
        return [(None, gm)]
    from torch.fx.passes.utils.fuser_utils import erase_nodes, fuse_as_graphmodule, insert_subgm

    for node in inner(gm):
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = run_checkpoint
    keep_recipes_for_functions(gm)
    for node in gm.graph.nodes:
        node.meta.setdefault("val", node.meta.get("example_value"))
    runs = _runs(gm)
    writes = Writes(inner(gm))
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
