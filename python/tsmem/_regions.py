"""Regions of torch.compiler.nested_compile_region, put back where they are called: eager code can't run them in torch 2.11, and nothing is rewritten in them.

Dynamo of torch 2.15 does so by itself for a backend like this one.
"""
import operator
from typing import Any, Dict, List

import torch
from torch import fx


def _copied(gm: fx.GraphModule, body: fx.GraphModule, call: fx.Node) -> List[Any]:
    """The body's nodes before `call`, with its operands; what they result in."""
    operands = iter(call.args[2:])  # behind the body and its name
    values: Dict[fx.Node, fx.Node] = {}
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(operands)
            elif node.op == "output":
                return [values.get(result, result) for result in node.args[0]]
            else:
                values[node] = gm.graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    values[node].target = f"{call.name}_{node.target}".replace(".", "_")
                    setattr(gm, values[node].target, getattr(body, node.target))
    return []


def put_back_regions(gm: fx.GraphModule) -> None:
    for call in list(gm.graph.nodes):
        if call.target is not torch.ops.higher_order.invoke_subgraph:
            continue
        attribute = call.args[0]
        body = getattr(gm, attribute.target)
        put_back_regions(body)
        results = _copied(gm, body, call)
        for user in list(call.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(call)
        if not attribute.users:
            gm.graph.erase_node(attribute)
    gm.recompile()
