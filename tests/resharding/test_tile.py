"""The tiles of a DTensor are those that DTensor itself cuts."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxpar._torch.distributed import StridedShard
from fxpar.resharding.tile import tiles_of_placements
from tests.resharding.pieces import taken
from tests.support.fake_mesh import fake_mesh


@st.composite
def placements(draw: st.DrawFn) -> list[Placement]:
    """Of a tensor of two dims on a mesh of two axes; strided shards too."""
    one = st.one_of(
        st.just(Replicate()),
        st.integers(0, 1).map(Shard),
        st.builds(StridedShard, st.integers(0, 1), split_factor=st.integers(1, 3)),
    )
    return [draw(one), draw(one)]


@given(placements(), st.tuples(st.integers(0, 14), st.integers(0, 14)))
def test_uneven_and_strided_shards_are_cut_axis_by_axis(found: list[Placement], shape: tuple[int, int]) -> None:
    with fake_mesh(y=2, x=3):
        mesh = init_device_mesh("cpu", (2, 3))
        assert dist.get_world_size() == mesh.size()
        tiles = tiles_of_placements(shape, mesh, found)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for rank, index in enumerate(product(range(2), range(3))):
        piece = whole
        for place, parts, placement in zip(index, (2, 3), found, strict=True):
            if isinstance(placement, Shard | StridedShard):
                pieces, _ = placement._split_tensor(piece, parts, with_padding=False, contiguous=False)
                piece = pieces[place]
        assert torch.equal(taken(whole, tiles[rank]), piece), f"rank {rank}: {tiles[rank]}"
