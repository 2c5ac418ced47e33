"""Runs a program's calls and writes down all that a user can see of them; compares two such records."""
import math
from typing import Any, Dict, List, Optional

import torch

Record = Dict[str, Any]
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def dtype_of(config: dict) -> torch.dtype:
    return getattr(torch, config["dtype"])


def tensors(value: Any) -> List[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for key in value for t in tensors(value[key])]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return []


def prepare(module: torch.nn.Module, config: dict) -> None:
    """Weights that are no identity, the dtype, what is frozen before the model is saved."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    module.to(dtype_of(config))
    if not config["freeze_after"]:
        freeze(module, config)
    module.train(config["calls"][0][0])


def freeze(module: torch.nn.Module, config: dict) -> None:
    if config["frozen"]:
        for name, p in module.named_parameters():
            if config["frozen"] == "all" or name.startswith(config["frozen"]):
                p.requires_grad_(False)


def inputs(config: dict, call: int, dtype: torch.dtype, noise: float = 0.0) -> tuple:
    """Leaves, and what is passed: a leaf, made from one (so that it can be overwritten), or without a gradient."""
    generator = torch.Generator().manual_seed(call)
    leaves, passed = [], []
    for kind in config["inputs"]:
        x = torch.randn(config["shape"], generator=generator, dtype=torch.float64)
        x = x.to(dtype_of(config)).to(dtype)
        if noise:
            x = x * (1 + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(dtype)
        if config["layout"] == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        if kind != "plain":
            x.requires_grad_()
        leaves.append(x)
        passed.append(x.clone() if kind == "made" else x)
    return leaves, passed


def lists_and_numbers(module: torch.nn.Module) -> Record:
    found = {}
    for path, m in module.named_modules():
        for name in ("hist", "count"):
            if hasattr(m, name):
                found[f"{path}.{name}"] = getattr(m, name)
    return found


def one_call(module, config: dict, call: int, dtype: torch.dtype, noise: float) -> Record:
    train, flag, n, grad = config["calls"][call]
    module.train(train)
    for p in module.parameters():
        p.grad = None
    twice = [inputs(config, seed, dtype, noise) for seed in ((call, 50 + call) if config["backward"] == "two calls" else (call,))]
    leaves, passed = [[x for one in twice for x in one[i]] for i in (0, 1)]
    torch.default_generator.manual_seed(100 + call)
    r: Record = {"grad mode": grad}
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=config["autocast"]):
        out = []
        for _, given in twice:
            arguments = given[:1] if config["method"] == "other" else given if config["how"] == "trace" else [*given, flag, n]
            out += tensors(getattr(module, config["method"])(*arguments))
    places: Dict[int, int] = {}
    for t in passed:
        places.setdefault(t.untyped_storage().data_ptr(), len(places))
    for i, t in enumerate(out):
        r[f"output {i}"] = t.detach().clone()
        r[f"output {i}, dtype"] = str(t.dtype)
        r[f"output {i}, requires_grad"] = t.requires_grad
        r[f"output {i}, strides"] = t.stride()
        r[f"output {i}, shares memory with"] = places.setdefault(t.untyped_storage().data_ptr(), len(places))
    for i, t in enumerate(passed):
        r[f"input {i} after forward"] = t.detach().clone()
        r[f"input {i} after forward, requires_grad"] = t.requires_grad
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in out]
    losses = [(t * w).sum() for t, w in zip(out, weights) if t.is_floating_point() and t.requires_grad]
    if losses and grad:
        backward(module, config["backward"], losses, leaves)
    for i, t in enumerate(leaves):
        r[f"gradient of input {i}"] = t.grad
    for name, p in module.named_parameters():
        r[f"gradient of {name}"] = p.grad
    for name, t in module.state_dict().items():
        r[f"state {name}"] = t.detach().clone()
    for name, value in lists_and_numbers(module).items():
        r[f"state {name}, length" if isinstance(value, list) else f"state {name}"] = len(value) if isinstance(value, list) else value
        for i, t in enumerate(tensors(value)):
            r[f"state {name}[{i}]"] = t.detach().clone()
    r["generator"] = torch.rand(2, dtype=torch.float64)
    return r


def backward(module, how: str, losses: List[torch.Tensor], leaves: List[torch.Tensor]) -> None:
    total = sum(losses[1:], losses[0])
    if how == "retain":
        total.backward(retain_graph=True)
        total.backward()
    elif how == "outputs":  # one at a time
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i + 1 < len(losses))
    elif how == "grad":  # some of it first
        some = [p for p in [*module.parameters(), *leaves] if p.requires_grad][:2]
        if some:
            torch.autograd.grad(total, some, retain_graph=True, allow_unused=True)
        total.backward()
    else:
        total.backward()


def snapshot(module) -> Record:
    """Parameters, buffers, lists and numbers, to be put back by restore()."""
    copy = lambda value: [t.detach().clone() for t in value] if isinstance(value, list) else value
    return {"tensors": [t.detach().clone() for t in module.state_dict().values()], "others": {name: copy(value) for name, value in lists_and_numbers(module).items()}}


def restore(module, state: Record) -> None:
    with torch.no_grad():
        for to, value in zip(module.state_dict().values(), state["tensors"]):
            to.copy_(value)
    if not state["others"]:
        return
    modules = dict(module.named_modules())
    for name, value in state["others"].items():
        path, attribute = name.rsplit(".", 1)
        setattr(modules[path], attribute, [t.clone() for t in value] if isinstance(value, list) else value)


def run(module, config: dict, dtype: Optional[torch.dtype] = None, noise: float = 0.0, states: Optional[List[Record]] = None, keep: Optional[List[Record]] = None) -> List[Record]:
    """A record for every call; one that raises is the last, and has its message under "raises".

    Every call begins with its entry of `states`, where these are given. `keep` takes what each began with.
    """
    records: List[Record] = []
    for call in range(len(config["calls"])):
        if states is not None:
            restore(module, states[call])
        if keep is not None:
            keep.append(snapshot(module))
        records.append(guarded(module, config, call, dtype, noise))
        if raised(records):
            break
    return records


def guarded(module, config: dict, call: int, dtype: Optional[torch.dtype] = None, noise: float = 0.0) -> Record:
    try:
        return one_call(module, config, call, dtype or dtype_of(config), noise)
    except Exception as error:  # whatever the program raises is what is compared
        return {"raises": f"{type(error).__name__}: {error}"}


def raised(records: List[Record]) -> Optional[str]:
    return records[-1].get("raises") if records else None


def norm(t: torch.Tensor) -> float:
    return torch.linalg.vector_norm(t, dtype=torch.float64).item() if t.numel() and t.is_floating_point() else 0.0


def errors(a: List[Record], b: List[Record]) -> Dict[str, float]:
    """The relative difference of every tensor that has the same shape in both. What is truly zero (the gradient of a bias before a norm) is held against the largest of its kind."""
    found = {}
    for call, (ra, rb) in enumerate(zip(a, b)):
        norms = {k: norm(v) for k, v in ra.items() if isinstance(v, torch.Tensor)}
        largest: Dict[str, float] = {}
        for k, v in norms.items():
            if math.isfinite(v):
                largest[k.split()[0]] = max(largest.get(k.split()[0], 0.0), v)
        for k in norms:
            u, v = ra[k], rb.get(k)
            if k == "generator" or not isinstance(v, torch.Tensor) or u.shape != v.shape:
                continue
            if u.dtype == v.dtype and torch.equal(u, v):
                found[f"call {call + 1}: {k}"] = 0.0
                continue
            u, v = u.to(torch.float64), v.to(torch.float64)
            if not u.isfinite().all():  # the same places, the same values elsewhere
                same = u.isfinite() == v.isfinite()
                if not same.all():
                    found[f"call {call + 1}: {k}"] = math.inf
                    continue
                u, v = u.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)
            distance = norm(u - v)
            # The last: inputs are about 1, and rounding remains of what is zero (a constant less its mean).
            scale = max(norm(u), 1e-3 * largest.get(k.split()[0], 0.0), 0.0 if k.startswith("state") else 1e-4 * math.sqrt(u.numel()))
            if distance == 0:
                error = 0.0
            elif math.isnan(distance):
                error = math.inf
            else:
                error = distance / scale if scale > 0 else math.inf
            found[f"call {call + 1}: {k}"] = error
    return found


def facts(a: List[Record], b: List[Record]) -> List[str]:
    """What differs and is no number: flags, dtypes, what is there at all, the generator, exceptions."""
    found = []
    for call, (ra, rb) in enumerate(zip(a, b)):
        if "raises" in rb and "raises" not in ra:
            return found + [f"call {call + 1}: raises {rb['raises']}"]
        if "raises" in ra and "raises" not in rb:
            return found + [f"call {call + 1}: does not raise {ra['raises']}"]
        for k in [*ra, *(k for k in rb if k not in ra)]:
            u, v = ra.get(k), rb.get(k)
            if k == "raises":
                continue
            if k.endswith("requires_grad") and u and not ra["grad mode"]:
                continue  # TorchScript's optimised graphs forget torch.no_grad() around the call
            if k.startswith("output") and k.endswith("requires_grad") and v:
                continue  # and in it; backward() has begun at this output, and the gradients are compared
            if k == "generator":
                same = torch.equal(u, v)
                u, v = "as it was", "elsewhere"
            elif isinstance(u, torch.Tensor) or isinstance(v, torch.Tensor):
                if k.startswith("gradient") and (u is None or v is None) and not (v if u is None else u).any():
                    continue  # TorchScript's derivatives have zeros where eager's have none
                describe = lambda t: None if t is None else (str(t.dtype), tuple(t.shape))
                u, v = describe(u), describe(v)
                same = u == v
            else:
                same = u == v
            if not same:
                found.append(f"call {call + 1}: {k}: {v} in place of {u}")
    return found
