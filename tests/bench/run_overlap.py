"""What ranks do to try the overlap benchmark; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar._torch.distributed import c10d_functional
from fxpar.bench.measure.interleaved import Sample
from fxpar.bench.overlap.cases import CHAIN_Z4, OverlapCase, chain, rows, silenced
from fxpar.bench.overlap.peers import data_parallel_step
from fxpar.bench.overlap.run import run_variants

SMALL_CHAIN = replace(CHAIN_Z4, build=partial(chain, 3, 8), batch=partial(rows, 8, 8), z=2)


def run_small(case: OverlapCase) -> Mapping[str, Sequence[Sample]]:
    """All variants of a case, once."""
    return run_variants(case, warm_up=0, repeats=1, tries=1)


def bucket_sizes() -> list[list[int]]:
    """The bytes of DDP's buckets for four weights of 256 bytes, where a bucket is to hold one, then two of them."""
    sizes = []
    for weights in (1, 2):
        step = data_parallel_step(chain(4, 8), rows(8, 8, 2), weights * 256 / 2**20)
        for _ in range(3):
            step()  # buckets are arranged after the first, and logged after the second
        sizes.append(list(map(int, step.args[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", "))))
    return sizes


def reduce_in_silence() -> list[Tensor]:
    """What an all-reduce over z returns that only the first rank takes part in."""
    mesh = silenced(fxpar.init_mesh(z=2))
    given = torch.full((3,), 1.0)
    found = []
    if dist.get_rank() == 0:
        started = c10d_functional.all_reduce(given, "sum", mesh.group("z").group_name)
        found.append(c10d_functional.wait_tensor(started))
    dist.barrier()
    return found
