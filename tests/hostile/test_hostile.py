"""A few of the files that `make hostile` goes through: each with two commands, all commands by turns."""
import pytest

import run_hostile


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return run_hostile.made_apart("models", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return run_hostile.made_apart("programs", tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    tool = run_hostile.Tool(tmp_path_factory.mktemp("tool"))
    yield tool
    tool.close()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_damaged_files(first, tool, models, tmp_path):
    assert [line for seed in range(first, first + 20) for line in run_hostile.check(tool, seed, models, tmp_path, few=True)[1]] == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_damaged_programs(first, tool, programs, tmp_path):
    assert [line for seed in range(first, first + 20) for line in run_hostile.check(tool, seed, programs, tmp_path, few=True)[1]] == []
