"""The command `tsmem`: finds the program and becomes it. Imports no torch, which would take longer than most commands."""
import os
import shutil
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def tool_path() -> str:
    """The program: $TSMEM_BIN, the installed package's, the build folder's of a source tree, or the one on PATH. Raises FileNotFoundError."""
    if os.environ.get("TSMEM_BIN"):
        return os.environ["TSMEM_BIN"]
    for path in (_HERE / "tsmem" / "bin" / "tsmem", _HERE.parent / "build" / "bin" / "tsmem"):
        if path.is_file():
            return str(path)
    found = shutil.which("tsmem")
    if found is not None:
        with open(found, "rb") as file:  # what lies on PATH may be the script that calls this
            if file.read(4) == b"\x7fELF":
                return found
    raise FileNotFoundError("the program 'tsmem' was not found: install the package with pip, or run 'make build' in its source tree.")


def main() -> int:
    try:
        tool = tool_path()
        os.execv(tool, ["tsmem", *sys.argv[1:]])
    except OSError as error:
        print(f"tsmem: {error}", file=sys.stderr)
        return 3
