"""`fxpar.reshard` moves any DTensor bit for bit, whoever is in which mesh; what does not fit is said before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fxpar
from fxpar._torch.distributed import device_mesh_without_groups
from fxpar.errors import ReshardError, UnknownAlgorithmError, UnknownStrategyError
from fxpar.world.launch import run_ranks
from tests.support.fake_mesh import fake_mesh
from tests.support.move_tensors import gather_by_rings, lose_a_rank, move_other_things, reshard_at_random


@pytest.mark.parametrize("ranks_per_host", [1, 3, 8])
def test_every_strategy_moves_random_tensors_bit_for_bit(ranks_per_host: int) -> None:
    """Between hosts by sockets, inside hosts by shared memory."""
    checked = run_ranks(8, reshard_at_random, ranks_per_host, 12, ranks_per_host, timeout_s=200)
    assert all(count > 0 for count in checked)


def test_what_is_passed_on_is_not_taken_for_what_is_sent() -> None:
    run_ranks(3, gather_by_rings, 50, timeout_s=100)


@pytest.fixture
def world() -> Iterator[DeviceMesh]:
    """Eight ranks on two axes, as rank 0 sees them."""
    with fake_mesh(x=8):
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("host", "device"))


def tensor_on(mesh: DeviceMesh, *placements: object) -> DTensor:
    return DTensor.from_local(torch.zeros(4, 6), mesh, placements, run_check=False)


def test_axis_names_say_what_placements_say(world: DeviceMesh) -> None:
    tensor = tensor_on(world, Replicate(), Replicate())
    for spec, placements in (
        ((None, "device"), [Replicate(), Shard(1)]),
        ((("host", "device"), None), [Shard(0), Shard(0)]),
        (("device", "host"), [Shard(1), Shard(0)]),
    ):
        plans = [fxpar.plan_reshard(tensor, world, layout, hosts=range(8)) for layout in (spec, placements)]
        assert plans[0] == plans[1], spec


def test_a_plan_prints_as_a_table(world: DeviceMesh) -> None:
    first, second = (device_mesh_without_groups("cpu", torch.arange(4) + 4 * i, ("x",)) for i in (0, 1))
    tensor = DTensor.from_local(torch.zeros(2, 6), first, [Shard(0)], run_check=False)
    plan = fxpar.plan_reshard(tensor, second, [Replicate()], hosts=[0, 0, 0, 0, 1, 1, 2, 2])
    text = str(plan)
    assert "broadcast, ordered by best: 4 unit tasks" in text
    assert "makespan 192, bound 192 bytes at one interface, ratio 1.000" in text
    assert "0@0 -> 4@1+5 -> 6@2+7" in text, text


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ((None, "devices"), "names axis 'devices': dst_mesh has .*'host', 'device'"),
        (("device", "device"), "uses axis 'device' twice"),
        ((("device", "host"), None), r"shards dim 0 by \('device', 'host'\): expected the order of dst_mesh"),
        (("device",), "expected an entry for each of the tensor's 2 dims"),
        ([Shard(0)], "expected 2 placements, one for each axis"),
        ([Shard(0), Shard(2)], "the tensor has 2 dims"),
        ([Partial(), Replicate()], "expected shards and replicas"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(world: DeviceMesh, layout: list[object], problem: str) -> None:
    with pytest.raises(ReshardError, match=problem):
        fxpar.plan_reshard(tensor_on(world, Replicate(), Replicate()), world, layout, hosts=range(8))


def test_meshes_that_do_not_go_together_are_refused(world: DeviceMesh) -> None:
    tensor = tensor_on(world, Replicate(), Replicate())
    larger = device_mesh_without_groups("cpu", torch.arange(16), ("x",))
    with pytest.raises(ReshardError, match="dst_mesh has rank 15, but this world has 8 ranks"):
        fxpar.plan_reshard(tensor, larger, [Replicate()], hosts=range(8))
    elsewhere = device_mesh_without_groups("cuda", torch.arange(8), ("x",))
    with pytest.raises(ReshardError, match="dst_mesh is of cuda, but the tensor is on cpu"):
        fxpar.plan_reshard(tensor, elsewhere, [Replicate()], hosts=range(8))
    with pytest.raises(ReshardError, match="hosts names 3 ranks"):
        fxpar.plan_reshard(tensor, world, [Replicate(), Replicate()], hosts=range(3))


def test_other_arguments_are_checked(world: DeviceMesh) -> None:
    tensor = tensor_on(world, Partial(), Replicate())
    with pytest.raises(ReshardError, match=r"partial values .* reduce them first"):
        fxpar.plan_reshard(tensor, world, [Replicate(), Replicate()])
    with pytest.raises(ReshardError, match="expected a DTensor, found Tensor"):
        fxpar.plan_reshard(torch.zeros(2), world, [Replicate(), Replicate()])
    whole = tensor_on(world, Replicate(), Replicate())
    with pytest.raises(UnknownStrategyError, match="'gather'"):
        fxpar.plan_reshard(whole, world, [Replicate()] * 2, strategy="gather", hosts=range(8))
    with pytest.raises(UnknownAlgorithmError, match="'first'"):
        fxpar.plan_reshard(whole, world, [Replicate()] * 2, algorithm="first", hosts=range(8))


def test_ranks_that_ask_for_different_things_learn_so_before_anything_moves() -> None:
    first, second = run_ranks(2, move_other_things, timeout_s=100)
    assert first == second
    assert "these differ from rank 0: the dtype (ranks 1; rank 0 has " in first
    assert "); the shape (ranks 1; rank 0 has " in first


@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 1, 1)], ids=["chain", "leader"])
def test_nobody_hangs_when_a_rank_dies_in_the_midst(hosts: tuple[int, ...]) -> None:
    """Killed is the middle of a chain, or who lets another of its host read, while chunks are under way."""
    for error, seconds in run_ranks(3, lose_a_rank, hosts, doomed=[1], timeout_s=100):
        assert error.startswith("lost rank 1 while moving"), error
        assert "a tensor of shape (33554432,) from [0]" in error
        assert seconds < 20, "it took no longer than a message may take"


def test_who_writes_for_a_reader_that_dies_goes_on() -> None:
    assert [error for error, _ in run_ranks(3, lose_a_rank, (0, 0, 0), doomed=[1], timeout_s=100)] == ["moved"] * 2
