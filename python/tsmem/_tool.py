"""The `tsmem` program."""
import _tsmem_cli

from ._error import Error


def tool_path() -> str:
    """The path of the `tsmem` program: $TSMEM_BIN, this package's, the build folder's, or the one on PATH. Raises tsmem.Error where there is none."""
    try:
        return _tsmem_cli.tool_path()
    except FileNotFoundError as error:
        raise Error(str(error)) from None
