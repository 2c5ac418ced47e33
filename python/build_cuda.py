"""What a build needs for the kernels for CUDA beside torch: nvcc, where the machine has none, and the headers of cuDNN's frontend.

    python python/build_cuda.py    # the packages of PyPI with nvcc that the build of a clone lacks, one a line
"""
import glob
import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Dict, List, Optional

# From CUDA 13 on PyPI has all that nvcc is made of.
_FIRST_ON_PYPI = 13


def wanted() -> str:
    """ON, OFF or AUTO. The kernels are ten minutes' work: built where there is a device, or where TSMEM_CUDA=ON asks for them."""
    return os.environ.get("TSMEM_CUDA") or ("AUTO" if _has_device() else "OFF")


def _has_device() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*")) or Path("/dev/dxg").exists()  # dxg: Windows' subsystem for Linux


def nvcc_of_the_machine() -> Optional[str]:
    """Where CMake looks too (cmake/TsmemCuda.cmake)."""
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [os.environ.get("CUDACXX"), *(f"{folder}/bin/nvcc" for folder in folders if folder), shutil.which("nvcc")]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def _cuda_of(torch: str) -> Optional[str]:
    """The version of CUDA that this torch is built with, as 13.2."""
    for line in (Path(torch) / "version.py").read_text().splitlines():
        if line.startswith("cuda: ") and "'" in line:
            return line.split("'")[1]
    return None


def _toolkit(torch: Optional[str]) -> List[str]:
    """nvcc from PyPI, of torch's version of CUDA. A torch that is fetched for the build pins the version itself."""
    if nvcc_of_the_machine():
        return []
    if not torch:
        return ["cuda-toolkit[cccl,nvcc]"]
    version = _cuda_of(torch)
    return [f"cuda-toolkit[cccl,nvcc]=={version}.*"] if version and int(version.split(".")[0]) >= _FIRST_ON_PYPI else []


def _frontend() -> str:
    """What pip installs for cuDNN's fused graphs: headers, by name and version."""
    lines = Path(__file__).with_name("requirements.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("nvidia-cudnn-frontend"))


def requires(torch: Optional[str]) -> List[str]:
    """What an isolated build installs; `torch`: the folder of the one it builds against, None where it fetches one."""
    return [] if wanted() == "OFF" else [_frontend(), *_toolkit(torch)]


def _file_of(package: str, name: str) -> Optional[str]:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.as_posix().endswith(name)), None)


def settings() -> Dict[str, str]:
    """What CMake is told. Without isolation what is not installed is left out, as the build then says."""
    told = {"cmake.define.TSMEM_CUDA": wanted()}
    if wanted() == "OFF":
        return told
    if header := _file_of("nvidia-cudnn-frontend", "include/cudnn_frontend.h"):
        told["cmake.define.TSMEM_CUDNN_FRONTEND"] = str(Path(header).parent)
    nvcc = None if nvcc_of_the_machine() else _file_of("nvidia-cuda-nvcc", "bin/nvcc")
    return {**told, "cmake.define.CMAKE_CUDA_COMPILER": nvcc} if nvcc else told


if __name__ == "__main__":
    found = importlib.util.find_spec("torch")
    if found and found.origin and wanted() != "OFF" and not _file_of("nvidia-cuda-nvcc", "bin/nvcc"):
        for package in _toolkit(str(Path(found.origin).parent)):
            print(package)
