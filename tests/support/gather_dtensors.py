"""Gather DTensors whose dim is nested between axes of the mesh; what ranks of a test run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

import fxpar
from fxpar.ir.dtensor import from_local, is_expressible
from fxpar.ir.layout import AXES, Layout, Shard
from fxpar.ir.tiles import shard_of
from fxpar.world.mesh import STAGE_AXES

NESTED = ("z", "y", "x")
"""The axes that may share a dim; each has two ranks."""


def nestings(free: Sequence[tuple[int, int, int, int]]) -> Iterator[Layout]:
    """Every order of some of the axes in dim 1, with as many `free` values before, between and after them."""
    for count in (1, 2, 3):
        for order in itertools.permutations(NESTED, count):
            for sizes in dict.fromkeys((*between[:count], between[3]) for between in free):
                yield _nested(order, sizes)


def _nested(order: Sequence[str], free: Sequence[int]) -> Layout:
    shards = {axis: Shard(1, 2, 2**place * math.prod(free[: place + 1])) for place, axis in enumerate(order)}
    size = 2 ** len(order) * math.prod(free)
    return Layout((6, size, 3), tuple((axis, shards[axis]) for axis in AXES if axis in shards))


def gather_nested() -> dict[str, bool]:
    """Which layouts give the whole tensor back on this rank, of those that can be said. A collective of eight ranks."""
    mesh = fxpar.init_mesh(z=2, y=2, x=2)
    right = {}
    beside = {axis: Shard(0, 2, 3) for axis in NESTED}
    for nested in nestings([(1, 1, 1, 1), (3, 1, 1, 2), (1, 3, 2, 1)]):
        used = [axis for axis, _ in nested.axes]
        others = [nested.with_placement(axis, beside[axis]) for axis in NESTED if axis not in used]
        for layout in (nested, *others[:1]):
            if is_expressible(layout, STAGE_AXES):
                whole = torch.arange(math.prod(layout.shape)).view(layout.shape)
                held = from_local(shard_of(whole, layout, mesh.coordinate).contiguous(), layout, mesh.stage_mesh)
                right[str(layout)] = torch.equal(held.full_tensor(), whole)
    return right
