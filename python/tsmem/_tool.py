"""Rewriting from Python: runs the `tsmem` program on a temporary file."""
import os
import subprocess
import tempfile
from typing import Any, Dict, List, Optional, Sequence

import _tsmem_cli
import torch

from ._error import Error

# Options of `tsmem rewrite` that make no sense, or something else, where a module goes in and comes out.
_NOT_HERE = {"output", "force", "dry_run", "explain", "json", "help", "restore", "inputs"}


def tool_path() -> str:
    """The path of the `tsmem` program: $TSMEM_BIN, this package's, the build folder's, or the one on PATH. Raises tsmem.Error where there is none."""
    try:
        return _tsmem_cli.tool_path()
    except FileNotFoundError as error:
        raise Error(str(error)) from None


def _call(arguments: List[str]) -> None:
    done = subprocess.run([tool_path(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode != 0:
        lines = [line for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        what = lines[0] if lines else f"tsmem ended with exit code {done.returncode}."
        for prefix in ("tsmem: ", "error: "):
            what = what.removeprefix(prefix)
        raise Error(what, done.returncode)


def _flags(options: Dict[str, Any], folder: str) -> List[str]:
    """Keyword arguments as command line options: batch_sizes=[8, 16] is --batch-sizes 8,16, only=["a", "b"] is --only a --only b."""
    flags: List[str] = []
    for name, value in options.items():
        if name in _NOT_HERE:
            raise Error(f"rewrite() has no option '{name}' in Python.", 2)
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            flags.append(flag)
        elif name == "input":
            flags += _inputs(value, folder)
        elif name == "batch_sizes" and not isinstance(value, str):
            flags += [flag, ",".join(str(v) for v in value)]
        elif isinstance(value, (list, tuple)):
            for v in value:
                flags += [flag, str(v)]
        else:
            flags += [flag, str(value)]
    return flags


def _cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: _cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cpu(v) for v in value) if not hasattr(value, "_fields") else tuple(_cpu(v) for v in value)
    return value


def _inputs(value: Any, folder: str) -> List[str]:
    """A SPEC or a list of them as they are; example arguments (a tensor, or a tuple of all arguments) through a file."""
    if isinstance(value, str):
        return ["--input", value]
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return [flag for v in value for flag in ("--input", v)]
    arguments = value if isinstance(value, tuple) else (value,)
    path = os.path.join(folder, "inputs.pt")
    torch.save(_cpu(arguments), path)
    return ["--inputs", "@" + path]


def _through_file(module: torch.jit.ScriptModule, arguments: List[str], options: Optional[Dict[str, Any]] = None) -> torch.jit.ScriptModule:
    if not isinstance(module, torch.jit.ScriptModule):
        what = "an eager nn.Module" if isinstance(module, torch.nn.Module) else f"a {type(module).__name__}"
        raise Error(f"{what} was given; tsmem rewrites TorchScript: pass torch.jit.script(model), or torch.jit.trace(model, example).", 2)
    devices = {t.device for tensors in (module.parameters(), module.buffers()) for t in tensors}
    with tempfile.TemporaryDirectory(prefix="tsmem-") as folder:
        before, after = os.path.join(folder, "model.pt"), os.path.join(folder, "rewritten.pt")
        torch.jit.save(module, before)
        _call(["rewrite", before, "-o", after, *arguments, *_flags(options or {}, folder)])
        # The file remembers each tensor's device; a module that lies on one device is put there, also where the tool moved it.
        return torch.jit.load(after, map_location=devices.pop() if len(devices) == 1 else None)


def rewrite(module: torch.jit.ScriptModule, **options: Any) -> torch.jit.ScriptModule:
    """The same model with memory-efficient operators, as a new module; `module` stays as it is.

    Options are those of `tsmem rewrite`, spelled as in Python: level="ops", only=["bn-act"], skip=..., module="layer1.*", freeze=..., train=...,
    method=..., seed=..., device=.... A list repeats the option, True sets a flag. `input` takes a SPEC ("8x3x224x224"), a list of them,
    a tensor, or a tuple with all arguments of forward; with it the numbers are verified too.

    Parameters, buffers, their devices, requires_grad and the training flags are the module's.
    Raises tsmem.Error with the tool's sentence; its `exit_code` is the tool's.
    """
    return _through_file(module, [], options)


def restore(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """The module with stock operators again, with the weights that it has now, as a new module. Raises tsmem.Error where it was not rewritten."""
    return _through_file(module, ["--restore"])
