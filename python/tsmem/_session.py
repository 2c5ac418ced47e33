"""Rewriting, verifying, measuring and planning in this process: no other program, no file."""
import ctypes
import json
import os
from typing import Any, Dict, Tuple

import torch

import _tsmem_cli

from ._error import Error
from ._exported import rewritten_program
from ._library import library_path

Report = Dict[str, Any]


def _library() -> Any:
    """The operators of libtsmem.so, which lies beside the op library."""
    if not any(name.startswith("tsmem_session::") for name in torch._C._dispatch_get_all_op_names()):
        path = os.path.join(os.path.dirname(library_path()), "libtsmem.so")
        if not os.path.isfile(path):
            raise Error(f"{path} does not exist: install the package with pip, or run 'make build' in its source tree.")
        highspy = _tsmem_cli.package_folder("highspy")
        solver = highspy / "libhighs.so.1" if highspy else None
        try:
            if solver is not None and solver.is_file():  # need not be where libtsmem.so looks for it
                ctypes.CDLL(str(solver))
            torch.ops.load_library(path)
        except OSError as error:
            raise Error(f"{path} can't be loaded: {error}") from error
    return torch.ops.tsmem_session


def _scripted(module: Any) -> Any:
    if isinstance(module, torch.jit.ScriptModule):
        return module._c
    name = type(module).__name__
    article = "An" if name[0] in "aeiouAEIOU" else "A"
    if isinstance(module, torch.export.ExportedProgram):
        what = "An ExportedProgram was given, and only tsmem.rewrite takes one: save it with torch.export.save and use the tsmem command, or pass TorchScript."
    elif isinstance(module, torch.nn.Module):
        what = ('An eager nn.Module was given: use torch.compile(model, backend="tsmem"), or pass TorchScript (torch.jit.script(model)), or to tsmem.rewrite a program of'
                " torch.export.")
    else:
        what = f"{article} {name} was given; tsmem takes TorchScript, and tsmem.rewrite a program of torch.export too: pass torch.jit.script(model)."
    raise Error(what, "request")


def split_options(options: Dict[str, Any]) -> Tuple[Any, str]:
    """Example arguments (a tensor, or a tuple of all arguments) apart from the options, in which `input` may also be a SPEC or a list of them."""
    options = dict(options)
    given = options.get("input")
    examples = None
    if given is not None and not isinstance(given, str) and not (isinstance(given, list) and given and all(isinstance(v, str) for v in given)):
        del options["input"]
        examples = given if isinstance(given, tuple) else (given,)
    try:
        return examples, json.dumps(options, default=list)
    except TypeError as error:
        raise Error(f"an option has a value of a type that it can't have: {error}.", "request") from None


def read_report(text: str) -> Any:
    report = json.loads(text)
    if isinstance(report, dict) and "error" in report and "kind" in report:
        raise Error(report["error"], report["kind"], report.get("about", ""))
    return report


def call_library(name: str, *arguments: Any) -> Any:
    # What runs a model draws random numbers; the caller's go on as if nothing had been.
    with torch.random.fork_rng():
        try:
            return getattr(_library(), name)(*arguments)
        except RuntimeError as error:
            if "Expected" not in str(error) and "type" not in str(error):
                raise
            raise Error(f"the example arguments can't be handed to TorchScript: {str(error).splitlines()[0]}", "request") from None


def _wrapped(module: Any) -> torch.jit.ScriptModule:
    return torch.jit._recursive.wrap_cpp_module(module)


def rewrite(module: Any, /, **options: Any) -> Any:
    """The same model with memory-efficient operators, as a new module; `module` stays as it is, and they share nothing.

    Takes a ScriptModule, or the ExportedProgram of torch.export.export, and gives the same: `.module()` of the new program trains.

    Options are those of `tsmem rewrite`, spelled as in Python: level="ops", only=["bn-act"], skip=..., module="layer1.*", checkpoint=...,
    freeze=..., train=..., amp="bf16", method=..., budget="40%", offload=True, link="25GB", batch_sizes=[8, 16], patterns="mine.patterns", seed=..., device=.... A list repeats the
    option, True sets a flag. `input` takes a SPEC ("8x3x224x224"), a list of them, a tensor, or a tuple with all arguments of forward; with it the numbers are
    verified too.

    Make the optimizer from the new module's parameters. Parameters, buffers, their devices, requires_grad and the training flags are the
    module's. Raises tsmem.Error with one sentence; its `kind` says what kind of fault it is.
    """
    examples, text = split_options(options)
    if isinstance(module, torch.export.ExportedProgram):
        return rewritten_program(module, lambda archive: call_library("rewrite_exported", archive, examples, text), read_report)
    new, report = call_library("rewrite", _scripted(module), examples, text)
    read_report(report)
    return _wrapped(new)


def restore(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """The module with PyTorch's operators again, with the weights that it has now, as a new module. Raises tsmem.Error where it was not rewritten."""
    new, report = call_library("restore", _scripted(module))
    read_report(report)
    return _wrapped(new)


def verify(a: torch.jit.ScriptModule, b: torch.jit.ScriptModule, **options: Any) -> Report:
    """Compares two modules as `tsmem verify` does: state, structure, and the numbers for `input` over several calls.

    Options: input (as for rewrite), calls, seeds, train, eval, thorough, no_measure, method, device, seed. Returns what `tsmem verify --json`
    writes; its "equal" is the answer. Both modules stay as they are. Raises tsmem.Error where the input does not fit or `a` can't run.
    """
    examples, text = split_options(options)
    return read_report(call_library("verify", _scripted(a), _scripted(b), examples, text))


def profile(module: torch.jit.ScriptModule, /, **options: Any) -> Report:
    """Memory (bytes) and time (seconds) of a training step, as `tsmem profile --json` writes them.

    Options: input (as for rewrite), eval, input_grad, steps, warmup, method, device, seed. Raises tsmem.Error where the model can't run.
    """
    examples, text = split_options(options)
    return read_report(call_library("profile", _scripted(module), examples, text))


def plan(module: torch.jit.ScriptModule, /, **options: Any) -> Report:
    """Peak memory (bytes) against step time (seconds) for every budget, as `tsmem plan --json` writes them.

    Options: input (as for rewrite), points, amp, patterns, estimate, offload, link, solve_seconds, method, device, seed. Raises tsmem.Error where
    the model can't run.
    """
    examples, text = split_options(options)
    return read_report(call_library("plan", _scripted(module), examples, text))


def diff(a: torch.jit.ScriptModule, b: torch.jit.ScriptModule, **options: Any) -> Report:
    """What differs between two modules' graphs, as `tsmem diff --format json` prints it. Option: method."""
    return read_report(call_library("diff", _scripted(a), _scripted(b), split_options(options)[1]))
