"""Every header stands alone, without the precompiled one, and includes are spelled one way."""
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
TORCH = pathlib.Path(torch.__file__).parent
FOLDERS = ["cli", "include", "ops", "patterns", "rewriter", "tests/cuda"]


def files(*endings):
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in endings)


@pytest.mark.parametrize("file", files(".h", ".cpp", ".cu"), ids=lambda p: str(p.relative_to(ROOT)))
def test_includes_are_spelled_from_the_root(file):
    """Those of ops/ from ops/, which is built and installed apart."""
    for name in re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE):
        begins = [ROOT / "ops", ROOT / "tests/cuda"] if file.parts[len(ROOT.parts)] in ("ops", "tests") else [ROOT, ROOT / "include"]
        assert any((begin / name).is_file() for begin in begins), name


def alone(header, folder):
    """What the compiler says of a header by itself, "" where it takes it; of CUDA's with the device emulated. ccache makes it milliseconds where nothing has changed."""
    compiler = [shutil.which("ccache")] if shutil.which("ccache") else []
    includes = [f"-I{ROOT / part}" for part in ("", "include", "ops", "tests/cuda")] + [f"-isystem{TORCH / 'include'}", f"-isystem{TORCH / 'include/torch/csrc/api/include'}"]
    command = [*compiler, "g++", "-std=c++20", "-O0", "-fPIC", "-DFMT_HEADER_ONLY=1", "-DTSMEM_EMULATE_CUDA", *includes]
    output = folder / (str(header.relative_to(ROOT)).replace("/", "_") + ".o")
    done = subprocess.run([*command, "-x", "c++", "-c", str(header), "-o", str(output)], capture_output=True, text=True, cwd=ROOT)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_headers_stand_alone(folder, tmp_path):
    headers = [p for p in files(".h") if str(p.relative_to(ROOT)).startswith(folder + "/")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for header, said in zip(headers, pool.map(lambda h: alone(h, tmp_path), headers)):
            assert not said, f"{header.relative_to(ROOT)} alone:\n{said}"
