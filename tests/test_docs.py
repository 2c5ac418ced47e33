"""The code that the documentation shows is the code in the tree."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def excerpts(page):
    """(file, code) of each block of code that begins with the name of a file."""
    return re.findall(r"```\w+\n(?://|!) (\S+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def is_excerpt(code, source):
    """Whether the parts of the code between lines of '...' stand in the source, in order."""
    at = 0
    for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
        at = source.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@pytest.mark.parametrize("page,file,code", [(page, *excerpt) for page in ("docs/adding-an-op.md", "docs/languages.md") for excerpt in excerpts(page)])
def test_pages_show_the_tree(page, file, code):
    assert is_excerpt(code, (ROOT / file).read_text()), f"{page} shows code that {file} has not:\n{code}"


def test_an_op_is_shown_whole():
    assert {file for file, _ in excerpts("docs/adding-an-op.md")} == {"ops/linear.cpp", "ops/act.cpp", "ops/cpu/act.cpp", "ops/meta/act.cpp"}


def test_programs_are_shown():
    assert {file for file, _ in excerpts("docs/languages.md")} == {"examples/train.f90", "examples/train.rs", "examples/train.go"}
