"""The wheel's build: scikit-build-core, with the torch that is installed here.

In an isolated build (pip's default) pip would fetch a second torch, of several GB; the one of the environment that pip installs into serves
as well, for its headers and libraries are all that is needed.
"""
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

try:
    from scikit_build_core.build import *  # noqa: F401,F403  (the hooks that need no change)
    from scikit_build_core import build as _build
except ImportError:
    raise SystemExit("tsmem is built with scikit-build-core and highspy: install both first, or build without --no-build-isolation.") from None

import build_cuda

_VERSIONS = Path(__file__).with_name("torch-versions.txt")
# Headers alone, which an sdist brings along (cmake/TsmemHeaders.cmake).
_HEADERS = ("CLI", "nlohmann", "dtl")


def torch_versions() -> Tuple[str, str]:
    """The oldest and the newest torch that tsmem works with."""
    oldest, newest = (line.split()[0] for line in _VERSIONS.read_text().splitlines() if line[:1].isdigit())
    return oldest, newest


def _minor(version: str) -> List[int]:
    return [int(n) for n in version.split(".")[:2]]


def _fits(folder: str) -> bool:
    text = (Path(folder) / "version.py").read_text()
    version = text.split("__version__ = '")[1].split("'")[0]
    oldest, newest = torch_versions()
    return _minor(oldest) <= _minor(version) <= _minor(newest)


def _installed_torch() -> Optional[str]:
    """The torch to build against: $TSMEM_TORCH, or what the Python that pip installs into would import, which pip hides from an isolated build.

    None where there is none, or one of another version.
    """
    if os.environ.get("TSMEM_TORCH"):
        return os.environ["TSMEM_TORCH"]
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s and s.origin else '')"
    for hidden in ((), ("PYTHONPATH", "PYTHONNOUSERSITE")):
        environment = {k: v for k, v in os.environ.items() if k not in hidden}
        origin = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/").stdout.strip()
        if origin and _fits(str(Path(origin).parent)):
            return str(Path(origin).parent)
    return None


def get_requires_for_build_wheel(config_settings: Optional[Dict[str, Any]] = None) -> List[str]:
    requires = _build.get_requires_for_build_wheel(config_settings)
    torch = _installed_torch()
    if not torch:
        requires = [*requires, f"torch=={torch_versions()[1]}"]
    return [*requires, *build_cuda.requires(torch)]


def build_wheel(wheel_directory: str, config_settings: Optional[Dict[str, Any]] = None, metadata_directory: Optional[str] = None) -> str:
    torch = _installed_torch()
    if torch is None:
        oldest, newest = torch_versions()
        raise SystemExit(f"tsmem is built against an installed torch of version {oldest} to {newest}: install one first, or set TSMEM_TORCH to its folder.")
    highspy = importlib.util.find_spec("highspy")
    if highspy is None or highspy.origin is None:
        raise SystemExit("tsmem's planner is built against the library in highspy: install highspy, or build without --no-build-isolation.")
    highs = Path(highspy.origin).parent / "libhighs.so.1"
    if not highs.is_file():
        raise SystemExit(f"tsmem's planner is built against the library in highspy, and {highs} does not exist: install highspy 1.15.1.")
    settings = {
        **build_cuda.settings(),
        **(config_settings or {}),
        "cmake.define.TSMEM_TORCH": torch,
        "cmake.define.TSMEM_HIGHS": str(highs),
    }
    return _build.build_wheel(wheel_directory, settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Optional[Dict[str, Any]] = None) -> str:
    """With the headers that the build needs, where they are installed."""
    name = _build.build_sdist(sdist_directory, config_settings)
    path = Path(sdist_directory) / name
    missing = [folder for folder in _HEADERS if not (Path("/usr/include") / folder).is_dir()]
    if missing:
        raise SystemExit(f"an sdist carries the headers of CLI11, nlohmann-json and dtl: /usr/include/{missing[0]} is missing; run 'make build' first.")
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member).read() if member.isfile() else None) for member in archive.getmembers()]
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data) if data is not None else None)
        for folder in _HEADERS:
            archive.add(Path("/usr/include") / folder, f"{name.removesuffix('.tar.gz')}/third_party/{folder}")
    return name
