"""Every header stands alone, without the precompiled one, and includes are spelled one way."""
import concurrent.futures
import os
import pathlib
import re
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
TORCH = pathlib.Path(torch.__file__).parent
PARTS = ["", "include", "ops", "tests/cuda"]
LARGE = ["torch/csrc/jit/ir/ir.h", "torch/csrc/jit/api/module.h", "ATen/ATen.h"]  # seconds each to read, the largest first
FOLDERS = ["cli", "include", "ops", "patterns", "rewriter", "tests/cuda"]


def files(*endings):
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in endings)


@pytest.mark.parametrize("file", files(".h", ".cpp", ".cu"), ids=lambda p: str(p.relative_to(ROOT)))
def test_includes_are_spelled_from_the_root(file):
    """Those of ops/ from ops/, which is built and installed apart."""
    for name in re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE):
        begins = [ROOT / "ops", ROOT / "tests/cuda"] if file.parts[len(ROOT.parts)] in ("ops", "tests") else [ROOT, ROOT / "include"]
        assert any((begin / name).is_file() for begin in begins), name


def reached(path):
    """The headers that this one includes, itself or by others of the tree, and itself: paths of the tree's, names of others."""
    found, todo = set(), [path]
    while todo:
        header = todo.pop()
        if header in found:
            continue
        found.add(header)
        if isinstance(header, pathlib.Path):
            names = re.findall(r'^#include [<"](.*)[>"]', header.read_text(), re.MULTILINE)
            todo += [next((p for p in (ROOT / part / name for part in PARTS) if p.is_file()), name) for name in names]
    return found


def rows(headers):
    """Lists of headers, each of which includes all those before it: compiled after them, it is given nothing that it does not include itself.
    With each, the large one that all of its headers include."""
    reach = {header: reached(header) for header in headers}
    large = {header: next((name for name in LARGE if name in reach[header]), None) for header in headers}
    lists = []
    for header in sorted(headers, key=lambda h: len(reach[h])):
        fitting = [row for row in lists if row[-1] in reach[header] and large[row[-1]] == large[header]]
        if fitting:
            max(fitting, key=lambda row: len(reach[row[-1]])).append(header)
        else:
            lists.append([header])
    return [(row, large[row[0]]) for row in lists]


END = "the end of the headers"


def compiled(source, *options):
    """What the compiler says of a file, "" where it takes it, or gets as far as END. CUDA's device is emulated."""
    includes = [f"-I{ROOT / part}" for part in PARTS] + [f"-isystem{TORCH / part}" for part in ("include", "include/torch/csrc/api/include")]
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-DFMT_HEADER_ONLY=1", "-DTSMEM_EMULATE_CUDA", *includes, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stderr if done.returncode and END not in done.stderr else ""


def test_headers_stand_alone(tmp_path):
    """One of torch's that a row includes anyway is read precompiled."""
    whole = {name: tmp_path / f"{i}.h" for i, name in enumerate(LARGE)}
    for name, path in whole.items():
        path.write_text(f"#include <{name}>\n")

    def check(i, row, large):
        source = tmp_path / f"row{i}.cpp"
        # An error that ends the compilation there: what would come is torch's templates, which take seconds.
        source.write_text("".join(f'#include "{header}"\n' for header in row) + f'static_assert(false, "{END}");\n')
        return compiled(source, "-fsyntax-only", "-Wfatal-errors", *(["-include", str(whole[large])] if large else []))

    try:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            said = list(pool.map(lambda path: compiled(path, "-x", "c++-header", "-o", f"{path}.gch"), whole.values()))
            assert not any(said), said
            checks = [(row, pool.submit(check, i, row, large)) for i, (row, large) in enumerate(rows(files(".h")))]
            for row, done in checks:
                assert not done.result(), f"{', '.join(str(h.relative_to(ROOT)) for h in row)}:\n{done.result()}"
    finally:
        for path in whole.values():
            pathlib.Path(f"{path}.gch").unlink(missing_ok=True)
