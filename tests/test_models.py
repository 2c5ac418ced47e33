"""Whole models through the command line: rewrite, verify over four calls in train and eval mode, restore, diff.

The default is every small model of ours and a few real ones; TSMEM_ALL_MODELS=1 takes all of fixtures/models.txt, scripted and traced.
"""
import os

import pytest

import check_models
import models
import small

REAL = [("tv:resnet18", "script"), ("tv:resnet18", "trace"), ("tv:mobilenet_v3_large", "script"), ("timm:regnety_004", "trace")]
OURS = [(name, how) for name in small.MODELS for how in models.kinds(name)]
ALL = [(name, how) for name in models.names() for how in models.kinds(name)]


# A rewrite that finds nothing would pass the rest: the least that it finds in some.
LEAST = {("tv:resnet18", "script"): 20, ("tv:resnet18", "trace"): 20, ("unet", "script"): 10, ("cnn", "script"): 4}


@pytest.mark.parametrize("name,how", ALL if os.environ.get("TSMEM_ALL_MODELS") else OURS + REAL)
def test_model(name, how):
    least = LEAST.get((name, how))
    row = check_models.check(name, how, timeout=900, memory=least is not None)
    assert row["failed"] is None, check_models.text(row)
    if least is not None:
        assert row["matches"] >= least
        assert row["saved_ratio"] < 0.95


def test_the_least_is_of_models_that_are_run():
    assert LEAST.keys() <= set(OURS + REAL)
