"""Dynamo's graph in aten operators, before autograd and autocast take them apart."""
import contextlib
from typing import Any, ContextManager, Dict, List, Tuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._borders import inner
from ._error import Error
from ._graph import DATA
from ._refusals import refuse_written_data


class _Interpreter(fx.Interpreter):
    """`.data` is no operator, and tracing would take its result for a constant. Traced as detach, it becomes `.data` again."""

    def call_function(self, target: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        if target is not DATA:
            return super().call_function(target, args, kwargs)
        with fx.traceback.annotate({"tsmem": "data"}):
            return args[0].detach()


def _drop_casts(gm: fx.GraphModule) -> None:
    """x.to(x's own dtype) is x, which hides what x is from the patterns."""
    for node in inner(gm):
        if node.target is torch.ops.aten.to.dtype and not any(node.args[2:]) and not node.kwargs:
            val = node.args[0].meta.get("val")
            if isinstance(val, torch.Tensor) and val.dtype == node.args[1]:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)


def _drop_what_does_nothing(gm: fx.GraphModule) -> None:
    """Asserts, and what tracing does to a copy of torch.tensor([...]): to the patterns it is a write."""
    for node in inner(gm):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
        elif node.target is torch.ops.aten.detach_.default and node.args[0].target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _note_overwritten(aten: fx.GraphModule, part: fx.GraphModule) -> None:
    """Tells `describe` what the rest of the graph overwrites."""
    inputs = [n for n in aten.graph.nodes if n.op == "placeholder"]
    outputs = pytree.tree_leaves(aten.graph.output_node().args)
    for nodes, written in ((inputs, getattr(part, "overwritten_inputs", [])), (outputs, getattr(part, "overwritten_outputs", []))):
        for node, is_written in zip(nodes, written):
            if is_written and isinstance(node, fx.Node):
                node.meta["overwritten"] = True


def no_hooks() -> ContextManager[None]:
    """The caller's saved-tensor hooks are for what runs, and not for what is traced or measured: torch.utils.checkpoint counts."""
    return torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing()


def aten_graph(gm: fx.GraphModule, fakes: List[Any], casts_stay: bool) -> fx.GraphModule:
    """The same graph in aten operators, made ready for `describe`. It runs on Dynamo's own fake tensors: fresh ones would break its guards."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None)
    with mode or contextlib.nullcontext(), torch.enable_grad(), no_hooks(), fx.traceback.preserve_node_meta():
        aten = make_fx(lambda *a: _Interpreter(gm).run(*a), pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    for node in inner(aten):
        if node.target is torch.ops.aten.detach.default and "tsmem" in node.meta.get("custom", {}):
            node.target = DATA
    for node in aten.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(aten, node.target, None), FakeTensor):
            raise Error("a function in it makes a tensor by no operator of PyTorch's")
    refuse_written_data(aten)
    for node, fake in zip(aten.graph.find_nodes(op="placeholder"), fakes):
        node.meta["val"] = fake
    _note_overwritten(aten, gm)
    _drop_what_does_nothing(aten)
    if not casts_stay:
        _drop_casts(aten)
    return aten
