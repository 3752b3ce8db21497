"""A crossing between stages has the plan of an equal crossing elsewhere, which is made once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from unittest.mock import patch

import pytest
import torch

from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import Port, PortKind
from fxpar.resharding import pipeline
from fxpar.resharding.pipeline import Crossing, one_of_alike, stages_of
from fxpar.resharding.plan import make_plan
from fxpar.world.mesh import Mesh, num_batch_shards

NETWORK = Network(bytes_per_us=10.0, chunk_us=5.0)
ROWS, COLUMNS, WHOLE = Layout((8, 6), (("x", Shard(0, 2)),)), Layout((8, 6), (("x", Shard(1, 2)),)), Layout((8, 6))

HOSTS = {
    "one after another": tuple(rank // 2 for rank in range(24)),
    "a stage on one host": tuple(rank // 4 for rank in range(24)),
    "in turn": tuple(rank % 3 for rank in range(24)),
    "downwards": tuple(11 - rank // 2 for rank in range(24)),
    "uneven": tuple(rank // 5 for rank in range(24)),
}


def crossing(pipes: Sequence[int], source: Layout, targets: Sequence[Layout], name: str = "h") -> Crossing:
    """A value from the stage at the first of `pipes` to those at the others."""
    stages = tuple(pipes[1:])
    return Crossing(
        Port(PortKind.EDGE, name), False, pipes[0], stages, source, tuple(targets), torch.float32, tuple(pipes)
    )


@pytest.mark.parametrize("algorithm", ["naive", "balance", "best"])
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("pipes", [(0, 1), (4, 5), (5, 2), (1, 4, 2)])
def test_a_plan_is_that_of_its_own_ranks(pipes: tuple[int, ...], hosts: tuple[int, ...], algorithm: str) -> None:
    mesh = Mesh(pipe=6, data=2, x=2, hosts=hosts)
    for source in (ROWS, COLUMNS, WHOLE):
        moving = crossing(pipes, source, [COLUMNS, WHOLE][: len(pipes) - 1])
        held, needed, waves = moving.tiles(mesh)
        own = make_plan(held, needed, 4, hosts, "broadcast", algorithm, network=NETWORK, waves=waves)
        assert moving.planned(mesh, NETWORK, algorithm=algorithm).plan == own
        if algorithm == "balance":
            assert moving.time_us(mesh, NETWORK) == own.time_us(NETWORK)


@pytest.mark.parametrize(
    ("hosts_of_a_stage", "shards"),
    [((0, 0, 1, 1, 2, 2, 3, 3), 1), ((0, 0, 0, 0, 1, 1, 1, 1), 2), ((0, 1, 1, 2, 2, 3, 3, 0), 4)],
)
def test_batch_shards_on_hosts_of_their_own_are_timed_as_one(hosts_of_a_stage: tuple[int, ...], shards: int) -> None:
    hosts = tuple(host + 4 * pipe for pipe in range(2) for host in hosts_of_a_stage)
    mesh = Mesh(pipe=2, data=2, z=2, x=2, hosts=hosts)
    assert num_batch_shards(one_of_alike(stages_of(mesh, (0, 1)))) == shards
    for source, target in product((ROWS, COLUMNS, WHOLE), repeat=2):
        moving = crossing((0, 1), source, [target])
        whole = moving.planned(mesh, NETWORK, algorithm="balance").plan
        assert moving.time_us(mesh, NETWORK) == whole.time_us(NETWORK)


def plans_made(mesh: Mesh, crossings: Sequence[Crossing]) -> int:
    """How many plans are searched for."""
    pipeline._plan_of.cache_clear()
    with patch.object(pipeline, "make_plan", autospec=True, side_effect=make_plan) as made:
        for each in crossings:
            each.planned(mesh, NETWORK)
    return made.call_count


def test_equal_crossings_between_many_stages_are_planned_once() -> None:
    for stages in (4, 16):
        mesh = Mesh(pipe=stages, x=2, hosts=tuple(range(2 * stages)))
        chain = [crossing((pipe, pipe + 1), ROWS, [COLUMNS], f"h{pipe}") for pipe in range(stages - 1)]
        assert plans_made(mesh, chain) == 1


def test_stages_that_share_hosts_otherwise_have_plans_of_their_own() -> None:
    mesh = Mesh(pipe=3, x=2, hosts=(0, 0, 0, 0, 1, 1))  # the first two stages share a host
    assert plans_made(mesh, [crossing((0, 1), ROWS, [WHOLE]), crossing((1, 2), ROWS, [WHOLE])]) == 2
