"""The wheel's build: scikit-build-core, with the torch that is installed here.

In an isolated build (pip's default) pip would fetch a second torch, of several GB; the one of the environment that pip installs into serves
as well, for its headers and libraries are all that is needed.
"""
import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Optional

from scikit_build_core.build import *  # noqa: F401,F403  (the hooks that need no change)
from scikit_build_core import build as _build

TORCH = "2.11"


def _installed_torch() -> Optional[str]:
    """$TSMEM_TORCH, or the torch of this Python's environment where its version fits."""
    if os.environ.get("TSMEM_TORCH"):
        return os.environ["TSMEM_TORCH"]
    try:
        import torch  # a build without isolation

        folder = Path(torch.__file__).parent
    except ImportError:
        folder = Path(sysconfig.get_paths()["purelib"]) / "torch"
    version = folder / "version.py"
    if version.is_file() and f"__version__ = '{TORCH}." in version.read_text():
        return str(folder)
    return None


def get_requires_for_build_wheel(config_settings=None):
    requires = _build.get_requires_for_build_wheel(config_settings)
    return requires if _installed_torch() else [*requires, f"torch=={TORCH}.0"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    torch = _installed_torch()
    if torch is None:
        raise SystemExit(f"tsmem is built against torch {TORCH}: install torch=={TORCH}.0 first, or set TSMEM_TORCH to its folder.")
    highspy = importlib.util.find_spec("highspy")
    if highspy is None:
        raise SystemExit("tsmem's planner is built against the library in highspy: install highspy, or build with isolation.")
    highs = Path(highspy.origin).parent / "libhighs.so.1"
    settings = {**(config_settings or {}), "cmake.define.TSMEM_TORCH": torch, "cmake.define.TSMEM_HIGHS": str(highs)}
    return _build.build_wheel(wheel_directory, settings, metadata_directory)
