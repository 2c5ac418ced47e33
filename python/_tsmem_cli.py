"""The command `tsmem`: finds the program and becomes it. Imports no torch, which would take longer than most commands."""
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

_HERE = Path(__file__).resolve().parent


def package_folder(name: str) -> Optional[Path]:
    """Where Python would import a package from, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def torch_version(folder: Path) -> str:
    return re.search(r"^__version__ = '([^']+)'", (folder / "version.py").read_text(), re.MULTILINE).group(1)


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def builds(version: str) -> Iterator[Tuple[Path, Path]]:
    """The folder of the libraries and the program, in each place for those that were built for this torch: the installed package's, a source tree's."""
    installed = _HERE / "tsmem" / f"torch-{minor(version)}"
    yield installed, installed / "bin" / "tsmem"
    for tree in (_HERE.parent / f"build-{minor(version)}", _HERE.parent / "build"):
        yield tree / "lib", tree / "bin" / "tsmem"


def installed_for() -> List[str]:
    """The minor versions of torch that the installed package has libraries for."""
    found = [p.name.split("-")[1] for p in (_HERE / "tsmem").glob("torch-*")]
    return sorted(found, key=lambda v: [int(n) for n in v.split(".")])


def no_build_for(version: str) -> str:
    """What to say where the installed package has nothing for this torch."""
    return (
        f"tsmem is installed for torch {', '.join(installed_for())}, and this is torch {version}: "
        "install one of those, or a tsmem that was built for this one."
    )


def tool_path() -> str:
    """The program: $TSMEM_BIN, the installed package's for this torch, the build folder's of a source tree, or the one on PATH.

    Raises FileNotFoundError.
    """
    if os.environ.get("TSMEM_BIN"):
        return os.environ["TSMEM_BIN"]
    torch = package_folder("torch")
    version = torch_version(torch) if torch is not None else ""
    for _, path in builds(version):
        if path.is_file():
            return str(path)
    if installed_for():
        raise FileNotFoundError(no_build_for(version) if version else "no torch is installed for this Python: install it with pip.")
    found = shutil.which("tsmem")
    if found is not None:
        with open(found, "rb") as file:  # what lies on PATH may be the script that calls this
            if file.read(4) == b"\x7fELF":
                return found
    raise FileNotFoundError("the program 'tsmem' was not found: install the package with pip, or run 'make build' in its source tree.")


def _environment() -> Dict[str, str]:
    """The program looks for torch's and HiGHS's libraries beside the installed package; they may be wherever else Python looks."""
    environment = dict(os.environ)
    elsewhere = [
        folder / below
        for folder, below in ((package_folder("torch"), "lib"), (package_folder("highspy"), "."))
        if folder is not None and folder.parent.resolve() != _HERE
    ]
    if elsewhere and installed_for():
        before = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = ":".join([*map(str, elsewhere), *([before] if before else [])])
    return environment


def main() -> int:
    try:
        os.execve(tool_path(), ["tsmem", *sys.argv[1:]], _environment())
    except OSError as error:
        print(f"tsmem: {error}", file=sys.stderr)
        return 3
