"""Regions of torch.compiler.nested_compile_region, put back where they are called: eager code can't run them in torch 2.11, and nothing is rewritten in them.

Dynamo of torch 2.15 does so by itself for a backend like this one.
"""
from typing import Any, Dict

import torch
from torch import fx


def put_back_regions(gm: fx.GraphModule) -> None:
    for call in list(gm.graph.nodes):
        if call.target is not torch.ops.higher_order.invoke_subgraph:
            continue
        attribute, _, *operands = call.args
        body = getattr(gm, attribute.target)
        put_back_regions(body)
        values: Dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands))
        with gm.graph.inserting_before(call):
            results = gm.graph.graph_copy(body.graph, values)
        for constant in body.graph.find_nodes(op="get_attr"):
            values[constant].target = f"{call.name}_{constant.target}".replace(".", "_")
            setattr(gm, values[constant].target, getattr(body, constant.target))
        for user in list(call.users):
            user.replace_all_uses_with(results[user.args[1]])  # users take the tuple of results apart
            gm.graph.erase_node(user)
        gm.graph.erase_node(call)
        if not attribute.users:
            gm.graph.erase_node(attribute)
    gm.recompile()
