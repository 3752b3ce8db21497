"""Fused and unfused graphs by the real ops; runs on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.lowering import lower
from fxpar.lowering.aten import lower_to_aten
from tests.passes.fusing import Local, Write, fuse_always, random_inputs


def run_asleep(writes: Sequence[Write]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """For each graph, what it returns with fused ops where ranks sleep instead of computing, and what it should."""
    mesh = fxpar.init_mesh(x=dist.get_world_size())
    found = []
    for write in writes:
        local = Local(mesh)
        before = local.finish(write(local))
        inputs = random_inputs(before, mesh.rank)
        (fused,) = fuse_always([before], mesh)
        found.append((list(lower("sleep")(fused.module)(*inputs)), list(lower_to_aten(before)(*inputs))))
    return found


def run_both(writes: Sequence[Write], dtype: torch.dtype) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """For each of the graphs its name, and what it returns with fused ops and without, on this rank."""
    mesh = fxpar.init_mesh(x=dist.get_world_size())
    found = []
    for write in writes:
        local = Local(mesh, dtype)
        before = local.finish(write(local))
        inputs = random_inputs(before, mesh.rank)
        (after,) = (each.module for each in fuse_always([before], mesh))
        with torch.no_grad():
            found.append((write.__name__, list(lower_to_aten(after)(*inputs)), list(lower_to_aten(before)(*inputs))))
    return found
