"""The largest model of Singh et al. is planned for as many ranks as they had, in a minute and little memory."""

from __future__ import annotations

import os
import resource

import pytest
import torch
import torch.distributed as dist

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.published_models import GPTS
from tests.support.small_models import GPT

RANKS, TOKENS, LENGTH = 1024, 2**22, 2048
GIBIBYTE = 2**30


def plan_the_largest() -> tuple[str, float, float, float]:
    """The best mesh, its memory in GiB, and what planning took: seconds of this process, and GiB at most."""
    dist.destroy_process_group()
    size = GPTS["GPT-80B"]
    with torch.device("meta"):
        model = GPT(vocabulary=51200, width=size.hidden, heads=size.num_heads, length=LENGTH, layers=size.num_layers)
        tokens = torch.zeros(TOKENS // LENGTH, LENGTH, dtype=torch.long)
    before = sum(os.times()[:2])
    ranking = fxpar.plan(model, (tokens, tokens), "perlmutter", RANKS)
    taken = sum(os.times()[:2]) - before
    best = ranking.ranked[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return str(best.configuration), best.estimate.peak_bytes / GIBIBYTE, taken, peak / GIBIBYTE


@pytest.mark.every_mesh
def test_a_model_of_80_billion_parameters_is_planned_for_1024_ranks() -> None:
    ((best, needed, seconds, taken),) = run_ranks(1, plan_the_largest)
    assert needed < 40, best
    assert seconds < 60 and taken < 8, (best, seconds, taken)
