"""Programs of torch.export, handed over as the archives that torch.export.save writes."""
import ctypes
import io
from typing import Any, Callable, Dict, Tuple

import torch

from ._error import Error


def rewritten_program(
    program: torch.export.ExportedProgram, rewrite: Callable[[torch.Tensor], Tuple[torch.Tensor, str]], check: Callable[[str], object]
) -> torch.export.ExportedProgram:
    """`rewrite` takes an archive's bytes and returns new ones with a report, which `check` raises as an error where it is one."""
    _refuse_without_values(program)
    archive = io.BytesIO()
    try:
        torch.export.save(program, archive)
    except Exception as error:
        raise Error(f"torch.export.save can't save the program: {str(error).splitlines()[0]}") from error
    new, report = rewrite(torch.frombuffer(archive.getbuffer(), dtype=torch.uint8))
    check(report)
    try:
        rewritten = torch.export.load(io.BytesIO(ctypes.string_at(new.data_ptr(), new.numel())))
    except Exception as error:
        raise Error(f"torch.export.load can't load the program once it is saved: {str(error).splitlines()[0]}") from error
    _tie(rewritten.state_dict, program.state_dict)
    _tie(rewritten.constants, program.constants)
    return rewritten


def _refuse_without_values(program: torch.export.ExportedProgram) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    for name, value in {**program.state_dict, **program.constants}.items():
        if isinstance(value, FakeTensor):
            raise Error(f"'{name}' of the program has no values: torch.export can't trace what made it (.data, say, where detach() would do), or ran on fake weights.")


def _tie(new: Dict[str, Any], old: Dict[str, Any]) -> None:
    """What is one tensor under several names stays one: torch.export.load makes several, which share memory, and get a gradient each."""
    first: Dict[int, str] = {}
    for name, value in old.items():
        new[name] = new[first.setdefault(id(value), name)]
