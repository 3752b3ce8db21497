"""Layouts as DTensors: a dim that several axes hold comes out whole, and the layout can be read off again."""

from __future__ import annotations

import torch

from fxpar._torch.distributed import device_mesh_without_groups
from fxpar.ir.dtensor import from_local, is_expressible, layout_of
from fxpar.ir.layout import Layout, Shard
from fxpar.world.launch import run_ranks
from tests.support.fake_mesh import fake_mesh
from tests.support.gather_dtensors import gather_nested, nestings


def test_every_nesting_of_axes_in_a_dim_is_read_off_its_dtensor() -> None:
    with fake_mesh(z=2, y=2, x=2) as mesh:
        for layout in nestings([(1, 1, 1, 1), (3, 1, 1, 2), (1, 3, 1, 2), (1, 1, 3, 1), (3, 5, 2, 7)]):
            piece = torch.empty(layout.local_shape(mesh.coordinate))
            assert layout_of(from_local(piece, layout, mesh.stage_mesh)) == layout


def test_a_value_without_dims_has_none_on_ranks_outside_of_its_mesh_either() -> None:
    with fake_mesh(x=2):
        elsewhere = device_mesh_without_groups("cpu", torch.tensor([1]), ("x",))
        found = from_local(torch.empty(0), Layout(()), elsewhere)
        assert found.shape == () and found.stride() == () and found.to_local().numel() == 0


def test_what_dtensors_can_say_they_gather_to_the_whole() -> None:
    everywhere = run_ranks(8, gather_nested)
    wrong = {layout for right in everywhere for layout, is_right in right.items() if not is_right}
    assert not wrong
    assert len(everywhere[0]) > 20, "those whose axes hold leading digits, in every order"


def test_digits_between_those_of_several_axes_cannot_all_be_said() -> None:
    def expressible(*shards: tuple[str, Shard]) -> bool:
        return is_expressible(Layout((36, 36), shards), ("y", "x", "z"))

    assert expressible(("y", Shard(0, 2, 2)), ("x", Shard(0, 2))), "[2@x*2@y*9]: the axes in another order"
    assert expressible(("y", Shard(0, 2)), ("x", Shard(0, 3, 6))), "[2@y*3*3@x*2]: only the last axis is strided"
    assert not expressible(("y", Shard(0, 2, 3)), ("x", Shard(0, 2, 6))), "[3*2@y*2@x*3]"
    assert expressible(("x", Shard(0, 2, 3))) and expressible(("y", Shard(0, 2, 3)), ("x", Shard(1, 2, 3)))
    assert not expressible(("z", Shard(1, 2, 3)), ("y", Shard(0, 2, 2)), ("x", Shard(0, 2))), "one spoils the other"
