"""FX graphs of aten operators as data, in the form of torch.export's archives, and back.

The form is that of "graph_module" in schema 8.17 to 8.20 (torch/_export/serde/schema.py); what Python alone can run is
named in it, and taken from the graph at hand when the rewritten one is built.
"""
import math
import operator
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

# The numbers that the schema gives them.
_DTYPES = {torch.uint8: 1, torch.int8: 2, torch.int16: 3, torch.int32: 4, torch.int64: 5, torch.float16: 6, torch.float32: 7,
           torch.float64: 8, torch.complex32: 9, torch.complex64: 10, torch.complex128: 11, torch.bool: 12, torch.bfloat16: 13,
           torch.uint16: 28, torch.float8_e4m3fn: 29, torch.float8_e5m2: 30, torch.float8_e4m3fnuz: 31, torch.float8_e5m2fnuz: 32}
_LAYOUTS = {torch.sparse_coo: 1, torch.sparse_csr: 2, torch.sparse_csc: 3, torch.sparse_bsr: 4, torch.sparse_bsc: 5, torch.strided: 7}
_FORMATS = {torch.contiguous_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3, torch.preserve_format: 4}
_NUMBERS = {f"_operator.{name}": getattr(operator, name) for name in
            "add sub mul truediv pow floordiv mod neg eq ne lt le gt ge and_ or_".split()}
_NUMBERS.update({"math.ceil": math.ceil, "math.floor": math.floor})
_NUMBERS.update({f"torch.{name}": getattr(torch, name) for name in "sym_int sym_float sym_not sym_max sym_min sym_sum".split()})
_NUMBER_NAMES = {function: name for name, function in _NUMBERS.items()}
_SYMBOLS = ((bool, torch.SymBool, "sym_bool"), (int, torch.SymInt, "sym_int"), (float, torch.SymFloat, "sym_float"))

# x.data: detach, whose result doesn't count as x where it is overwritten.
DATA = torch._C._autograd._get_data_attr

State = Dict[str, Tuple[str, torch.Tensor]]  # of a placeholder or get_attr node, by its name: path and tensor


def memory_of(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory; a tensor without memory shares none."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses that wrap others
        return id(tensor)


_ELSEWHERE = "tsmem_overwritten_elsewhere_"  # names a write that stands in the description alone, at its end


class _NoData(Exception):
    """A node that only Python can run."""


def _number(x: float) -> Any:
    return x if math.isfinite(x) else "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def _value(node: fx.Node) -> Dict[str, Any]:
    val = node.meta.get("val")
    for plain, symbolic, kind in _SYMBOLS:
        if isinstance(val, (plain, symbolic)):
            return {f"as_{kind}": {"as_name": node.name}}
    return {"as_tensor": {"name": node.name}}


def _list(values: List[Any]) -> Dict[str, Any]:
    items = [_argument(v) for v in values]
    kinds = {next(iter(item)) for item in items}
    if not items:
        return {"as_ints": []}
    if kinds == {"as_tensor"}:
        return {"as_tensors": [item["as_tensor"] for item in items]}
    if kinds <= {"as_tensor", "as_none"}:
        return {"as_optional_tensors": items}
    for kind in ("bool", "int", "float", "string"):
        if kinds == {f"as_{kind}"}:
            return {f"as_{kind}s": [item[f"as_{kind}"] for item in items]}
        if kinds <= {f"as_{kind}", f"as_sym_{kind}"}:
            return {f"as_sym_{kind}s": [item.get(f"as_sym_{kind}", item) for item in items]}
    if kinds == {"as_int", "as_float"}:
        return {"as_floats": [_number(float(v)) for v in values]}
    raise _NoData


def _argument(a: Any) -> Dict[str, Any]:
    if isinstance(a, fx.Node):
        return _value(a)
    if a is None:
        return {"as_none": True}
    if isinstance(a, (list, tuple)):
        return _list(list(a))
    for kind, name in ((bool, "as_bool"), (int, "as_int"), (str, "as_string")):
        if type(a) is kind:
            return {name: a}
    if type(a) is float:
        return {"as_float": _number(a)}
    if type(a) is complex:
        return {"as_complex": {"real": _number(a.real), "imag": _number(a.imag)}}
    if isinstance(a, torch.device):
        return {"as_device": {"type": a.type, "index": a.index}}
    for table, name in ((_DTYPES, "as_scalar_type"), (_LAYOUTS, "as_layout"), (_FORMATS, "as_memory_format")):
        if isinstance(a, (torch.dtype, torch.layout, torch.memory_format)) and a in table:
            return {name: table[a]}
    raise _NoData


def _results(node: fx.Node) -> List[Dict[str, Any]]:
    """A node's results; what its getitem users are called names those of a tuple or a list."""
    returns = node.target._schema.returns
    if len(returns) == 0:
        return []
    listed = len(returns) == 1 and isinstance(node.meta.get("val"), (list, tuple))
    if len(returns) == 1 and not listed:
        return [_value(node)]
    count = len(node.meta["val"]) if listed else len(returns)
    names = [f"{node.name}_unused_{k}" for k in range(count)]
    for user in node.users:
        if user.target is not operator.getitem:
            raise _NoData
        names[user.args[1]] = user.name
    results = [{"name": name} for name in names]
    return [{"as_tensors": results}] if listed else [{"as_tensor": r} for r in results]


def _nodes_in(node: fx.Node) -> Iterator[fx.Node]:
    return (a for a in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(a, fx.Node))


def _operation(node: fx.Node) -> Dict[str, Any]:
    if node.target is DATA:
        return {"target": "torch.ops.aten.detach.default", "inputs": [{"name": "self", "arg": _argument(node.args[0]), "kind": 1}], "outputs": [_value(node)]}
    if isinstance(node.target, torch._ops.OpOverload):
        formals = node.target._schema.arguments
        inputs = [{"name": f.name, "arg": _argument(a), "kind": 1} for f, a in zip(formals, node.args)]
        inputs += [{"name": name, "arg": _argument(a), "kind": 2} for name, a in node.kwargs.items()]
        return {"target": f"torch.ops.{node.target.namespace}.{node.target._opname}.{node.target._overloadname}",
                "inputs": inputs, "outputs": _results(node)}
    if node.target in _NUMBER_NAMES and not node.kwargs:
        inputs = [{"name": "", "arg": _argument(a), "kind": 1} for a in node.args]
        return {"target": _NUMBER_NAMES[node.target], "inputs": inputs, "outputs": [_value(node)]}
    raise _NoData


def _takes_apart(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0].target, torch._ops.OpOverload)


def describe(gm: fx.GraphModule, state: State, path_of: Callable[[fx.Node], str]) -> Dict[str, Any]:
    """The graph as JSON. `state` names the inputs that are parameters, buffers or constants; `path_of` gives a node's module."""
    graph: Dict[str, Any] = {"inputs": [], "outputs": [], "nodes": [], "tensor_values": {}, "sym_int_values": {}, "sym_bool_values": {}, "sym_float_values": {}}
    specs, about = [], {}
    storages: Dict[Any, int] = {}
    for node in gm.graph.nodes:
        for plain, symbolic, kind in _SYMBOLS:
            if isinstance(node.meta.get("val"), (plain, symbolic)):
                graph[f"{kind}_values"][node.name] = {}
        if node.op in ("placeholder", "get_attr"):
            if node.name in state:
                path, tensor = state[node.name]
                kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
                specs.append({kind: {"arg": {"name": node.name}, f"{kind}_name": path}})
                about[path] = {"dtype": _DTYPES.get(tensor.dtype, 0), "requires_grad": tensor.requires_grad,
                               "storage": storages.setdefault(memory_of(tensor), len(storages)), "position": len(about)}
            else:
                specs.append({"user_input": {"arg": _value(node)}})
            graph["inputs"].append(_value(node))
        elif node.op == "output":
            graph["outputs"] = [_value(a) for a in pytree.tree_leaves(node.args) if isinstance(a, fx.Node)]
        elif not _takes_apart(node):
            try:
                data = _operation(node)
            except _NoData:
                data = {"target": "python", "inputs": [{"name": "", "arg": _value(a)} for a in _nodes_in(node)], "outputs": [_value(node)]}
            path = path_of(node)
            data["metadata"] = {"nn_module_stack": f",{path},"} if path else {}
            data["name"] = node.name
            graph["nodes"].append(data)
    for node in [n for n in gm.graph.nodes if n.meta.get("overwritten")]:
        name = f"{_ELSEWHERE}{node.name}"
        graph["nodes"].append({"target": "torch.ops.aten.zero_.default", "inputs": [{"name": "self", "arg": _value(node), "kind": 1}],
                               "outputs": [{"as_tensor": {"name": name}}], "metadata": {"nn_module_stack": ",elsewhere,"}, "name": name})
    return {"graph": graph, "signature": {"input_specs": specs, "output_specs": []}, "state": about}


def _inverse(table: Dict[Any, int]) -> Dict[int, Any]:
    return {number: own for own, number in table.items()}


_READ = {"as_scalar_type": _inverse(_DTYPES), "as_layout": _inverse(_LAYOUTS), "as_memory_format": _inverse(_FORMATS)}


def _float(x: Any) -> float:
    return float(x.replace("Infinity", "inf")) if isinstance(x, str) else float(x)


def _read(a: Dict[str, Any], values: Dict[str, fx.Node]) -> Any:
    kind, v = next(iter(a.items()))
    if kind == "as_none":
        return None
    if kind == "as_tensor":
        return values[v["name"]]
    if kind == "as_tensors":
        return [values[t["name"]] for t in v]
    if kind == "as_optional_tensors":
        return [_read(t, values) for t in v]
    if kind.startswith("as_sym_"):
        numbers = [values[x["as_name"]] if "as_name" in x else next(iter(x.values())) for x in (v if isinstance(v, list) else [v])]
        return numbers if isinstance(v, list) else numbers[0]
    if kind in _READ:
        return _READ[kind][v]
    if kind == "as_device":
        return torch.device(v["type"], v["index"]) if v["index"] is not None else torch.device(v["type"])
    if kind == "as_complex":
        return complex(_float(v["real"]), _float(v["imag"]))
    if kind == "as_float":
        return _float(v)
    if kind == "as_floats":
        return [_float(x) for x in v]
    return v


def _names(outputs: List[Dict[str, Any]]) -> List[str]:
    names = []
    for a in outputs:
        kind, v = next(iter(a.items()))
        names += [t["name"] for t in v] if kind == "as_tensors" else [v["name"] if "name" in v else v["as_name"]]
    return names


def _overload(target: str) -> torch._ops.OpOverload:
    space, name, overload = target[len("torch.ops."):].split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def build(description: Dict[str, Any], gm: fx.GraphModule) -> fx.GraphModule:
    """The described graph, with the inputs, the structure of the results, and what Python alone can run, of `gm`."""
    graph, values = fx.Graph(), {}
    before = {node.name: node for node in gm.graph.nodes}
    made_by = {name: before[data["name"]] for data in description["original"]["nodes"] if data["name"] in before for name in _names(data["outputs"])}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            values[node.name] = graph.node_copy(node)
    for data in description["graph"]["nodes"]:
        if data["name"].startswith(_ELSEWHERE):
            continue
        names = _names(data["outputs"])
        if not data["target"].startswith("torch.ops.") or getattr(before.get(data["name"]), "target", None) is DATA:
            operands = iter([values[name] for a in data["inputs"] for name in _named(a["arg"])])
            values[names[0]] = graph.node_copy(before[data["name"]], lambda _: next(operands))
            continue
        args = tuple(_read(a["arg"], values) for a in data["inputs"] if a["kind"] == 1)
        kwargs = {a["name"]: _read(a["arg"], values) for a in data["inputs"] if a["kind"] == 2}
        target = _overload(data["target"])
        node = graph.create_node("call_function", target, args, kwargs, name=data["name"])
        old = next((made_by[name] for name in names if name in made_by), None)
        if old is not None:
            node.meta.update({k: v for k, v in old.meta.items() if k in ("stack_trace", "nn_module_stack")})
        if len(target._schema.returns) == 1 and "as_tensors" not in data["outputs"][0]:
            values[names[0]] = node
        else:
            for k, name in enumerate(names):
                values[name] = graph.create_node("call_function", operator.getitem, (node, k), {}, name=name)
    results = iter([_read(a, values) for a in description["graph"]["outputs"]])
    structure = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    graph.output(pytree.tree_map(lambda a: next(results) if isinstance(a, fx.Node) else a, structure))
    for node in reversed(list(graph.nodes)):  # results that nobody takes
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(gm, graph)


def _named(a: Dict[str, Any]) -> List[str]:
    """The values in an argument of what is no operator of PyTorch's, in order."""
    kind, v = next(iter(a.items()))
    if kind == "as_tensor":
        return [v["name"]]
    return [x["as_name"] for x in (v if isinstance(v, list) else [v]) if "as_name" in x] if kind.startswith("as_sym_") else []
