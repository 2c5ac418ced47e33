"""The code that the documentation shows is the code in the tree."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def excerpts(page):
    """(file, code) of each block of C++ that begins with the name of a file."""
    return re.findall(r"```cpp\n// (\S+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def is_excerpt(code, source):
    """Whether the parts of the code between lines of '...' stand in the source, in order."""
    at = 0
    for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
        at = source.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@pytest.mark.parametrize("file,code", excerpts("docs/adding-an-op.md"))
def test_adding_an_op_shows_the_tree(file, code):
    assert is_excerpt(code, (ROOT / file).read_text()), f"docs/adding-an-op.md shows code that {file} has not:\n{code}"


def test_an_op_is_shown_whole():
    assert {file for file, _ in excerpts("docs/adding-an-op.md")} == {"ops/linear.cpp", "ops/act.cpp", "ops/cpu/act.cpp", "ops/meta/act.cpp"}
