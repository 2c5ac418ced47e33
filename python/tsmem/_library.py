"""Finds and loads libtsmem_ops.so."""
import os
from pathlib import Path
from typing import Optional

import torch

import _tsmem_cli

from ._error import Error

_NAME = "libtsmem_ops.so"


def library_path() -> str:
    """The path of the op library: $TSMEM_OPS where set, else the one in this package for this torch, else the one in the build folder.

    Raises tsmem.Error where there is none.
    """
    chosen = os.environ.get("TSMEM_OPS")
    if chosen:
        if not os.path.isfile(chosen):
            raise Error(f"TSMEM_OPS names '{chosen}', which does not exist.")
        return chosen
    for folder, _ in _tsmem_cli.builds(torch.__version__):
        if (folder / _NAME).is_file():
            return str(folder / _NAME)
    if _tsmem_cli.installed_for():
        raise Error(_tsmem_cli.no_build_for(torch.__version__))
    here = Path(__file__).resolve().parent
    raise Error(f"{_NAME} was not found in {here}: install the package with pip, run 'make build' in its source tree, or set TSMEM_OPS.")


def loaded() -> bool:
    """True where the operators are registered, by whichever copy of the library."""
    return any(name.startswith("tsmem::") for name in torch._C._dispatch_get_all_op_names())


def _built_for(library: str) -> Optional[str]:
    """The torch version that the library was built for; the build writes it beside the library."""
    note = Path(library).with_suffix(".torch")
    return note.read_text().strip() if note.is_file() else None


def load() -> None:
    """Loads the op library into this process, once.

    Nothing is loaded where the operators are known already, as with LD_PRELOAD.
    Raises tsmem.Error where the library is missing or was built for another torch.
    """
    if loaded():
        return
    path = library_path()
    built = _built_for(path)
    if built is not None and _tsmem_cli.minor(built) != _tsmem_cli.minor(torch.__version__):
        raise Error(
            f"the library was built for torch {_tsmem_cli.minor(built)} and this is torch {torch.__version__}; "
            "install tsmem again, built against this torch."
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise Error(f"{path} can't be loaded: {error}") from error
