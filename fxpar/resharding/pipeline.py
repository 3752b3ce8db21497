"""The values that move between stages, and the graph of a whole pipelined step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port, PortKind
from fxpar.resharding.plan import ReshardPlan, make_plan
from fxpar.resharding.tile import Tile, Tiles, tile_of
from fxpar.schedule import Edge
from fxpar.world.mesh import Mesh, num_batch_shards


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that moves from the ranks of stage `source` to those of all `targets`, each with its own layout.

    The value is that of `port` or, if `is_gradient`, its gradient. Layouts are those of one batch shard's value.
    `pipes` are the pipe coordinates of the source and of each target; by default stage s is at s. Targets with the same
    pipe coordinate have the same layout.
    """

    port: Port
    is_gradient: bool
    source: int
    targets: tuple[int, ...]
    source_layout: Layout
    target_layouts: tuple[Layout, ...]
    dtype: torch.dtype
    pipes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        layouts = self.source_layout, *self.target_layouts
        assert not any(layout.is_partial for layout in layouts), f"{self.name} is not reduced: {layouts}"
        if not self.pipes:
            object.__setattr__(self, "pipes", (self.source, *self.targets))
        arriving = set(zip(self.pipes[1:], self.target_layouts, strict=True))
        assert len(arriving) == len(self.target_pipes), f"{self.name}: one layout at each place, not {arriving}"

    @property
    def name(self) -> str:
        """A name for messages, unique in a pipeline."""
        what = "gradient" if self.is_gradient else "value"
        stages = f"stage{'s' if len(self.targets) > 1 else ''} {', '.join(map(str, self.targets))}"
        return f"the {what} of {self.port.kind.value} {self.port.name} from stage {self.source} to {stages}"

    @property
    def source_pipe(self) -> int:
        """The pipe coordinate of the source."""
        return self.pipes[0]

    @property
    def target_pipes(self) -> tuple[int, ...]:
        """The pipe coordinates of the targets, without repetitions."""
        return tuple(dict.fromkeys(self.pipes[1:]))

    @property
    def is_local(self) -> bool:
        """Whether nothing has to move: source and targets have the same ranks and the same layout."""
        return self.target_pipes == (self.source_pipe,) and set(self.target_layouts) == {self.source_layout}

    @property
    def is_of_parameter(self) -> bool:
        """Whether it is a tied parameter or the gradient of one, which cross once per step."""
        return self.port.kind is PortKind.PARAMETER

    @property
    def is_shared(self) -> bool:
        """Whether all batch shards have the same value, as they do of parameters only."""
        return self.is_of_parameter and not self.is_gradient

    def held(self, mesh: Mesh, coordinate: Mapping[str, int]) -> Tile:
        """The tile that the rank at `coordinate`, one of the source's, holds.

        The tile has an additional leading dim, whose indices are the batch shards: they move by one plan, since they
        share the interfaces of their hosts. Its size is 1 for a shared value.
        """
        return self._tile(self.source_layout, mesh, coordinate)

    def needed(self, mesh: Mesh, coordinate: Mapping[str, int]) -> Tile:
        """The tile that the rank at `coordinate`, one of a target's, needs; dims as in `held`."""
        return self._tile(self.target_layouts[self.pipes[1:].index(coordinate["pipe"])], mesh, coordinate)

    def planned(self, mesh: Mesh, network: Network, strategy: str = "broadcast", algorithm: str = "best") -> Reshard:
        """Plan its transfers; targets post their receives in the order of `targets`. Arguments as in `make_plan`.

        Raises:
            UnknownStrategyError, UnknownAlgorithmError: no such name.
        """
        places = self._places
        plan = _plan_of(self._alone, stages_of(mesh, places), network, strategy, algorithm)
        size = mesh.num_ranks // mesh.pipe
        ranks = [rank for place in places for rank in range(place * size, (place + 1) * size)]
        return Reshard(self, plan.moved_to(ranks, mesh.hosts))

    def time_us(self, mesh: Mesh, network: Network) -> float:
        """The predicted time of its transfers by broadcast in a quickly chosen order, in microseconds."""
        alone = stages_of(mesh, self._places)
        # Batch shards that share no host take as long together as each does.
        near = alone if self.is_shared else one_of_alike(alone)
        return _plan_of(self._alone, near, network, "broadcast", "balance").time_us(network)

    @property
    def _places(self) -> list[int]:
        """The pipe coordinates of the source and the targets, ascending."""
        return sorted(set(self.pipes))

    @property
    def _alone(self) -> Crossing:
        """The same on a mesh that has only the stages at `_places`, without the names: equal for equal transfers."""
        pipes = tuple(self._places.index(pipe) for pipe in self.pipes)
        stages = tuple(range(1, len(self.targets) + 1))
        return replace(self, port=Port(self.port.kind, ""), source=0, targets=stages, pipes=pipes)

    def tiles(self, mesh: Mesh) -> tuple[Tiles, Tiles, dict[int, int]]:
        """What the ranks of the source hold, what those of the targets need, and the latter's order of receiving."""
        source = self._stage_tiles(mesh, self.source_pipe, self.source_layout)
        destination: dict[int, Tile] = {}
        waves: dict[int, int] = {}
        for wave, pipe in enumerate(self.target_pipes):
            arriving = self._stage_tiles(mesh, pipe, self.target_layouts[self.pipes[1:].index(pipe)])
            destination |= arriving
            waves |= dict.fromkeys(arriving, wave)
        return source, destination, waves

    def _stage_tiles(self, mesh: Mesh, pipe: int, layout: Layout) -> dict[int, Tile]:
        """The tiles of all ranks of a stage."""
        known: dict[tuple[int, ...], Tile] = {}
        tiles: dict[int, Tile] = {}
        for coordinate in mesh.stage_coordinates(pipe):
            place = 0 if self.is_shared else mesh.batch_shard(coordinate)
            # Most ranks differ in their batch shard alone.
            within = tuple(coordinate[axis] for axis, _ in layout.axes)
            if within not in known:
                known[within] = tile_of(layout, coordinate)
            tiles[mesh.rank_at(coordinate)] = _of_shard(known[within], place)
        return tiles

    def _tile(self, layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> Tile:
        place = 0 if self.is_shared else mesh.batch_shard(coordinate)
        return _of_shard(tile_of(layout, coordinate), place)


def _of_shard(tile: Tile, place: int) -> Tile:
    """The tile of a value of batch shard `place` among the values of all."""
    return Tile((((place, place + 1),), *tile.ranges))


def stages_of(mesh: Mesh, places: Sequence[int]) -> Mesh:
    """The mesh of the ranks at these pipe coordinates, which are ascending; hosts are numbered anew, in their order.

    It is equal for stages that are placed on their hosts alike.
    """
    size = mesh.num_ranks // mesh.pipe
    hosts = [host for place in places for host in mesh.hosts[place * size : (place + 1) * size]]
    return replace(
        mesh, pipe=len(places), rank=0, device_mesh=None, hosts=tuple(_in_order(hosts).tolist()), cluster=None
    )


@lru_cache(maxsize=128)
def one_of_alike(mesh: Mesh) -> Mesh:
    """The mesh of the fewest consecutive batch shards such that all others are on hosts of their own, and alike."""
    count = num_batch_shards(mesh)
    hosts = np.asarray(mesh.hosts).reshape(mesh.pipe, count, -1)
    for few in (few for few in range(1, count) if count % few == 0):
        blocks = [hosts[:, start : start + few].reshape(-1) for start in range(0, count, few)]
        if sum(len(np.unique(block)) for block in blocks) > len(np.unique(hosts)):
            continue  # some share a host
        first, *others = map(_in_order, blocks)
        if all(np.array_equal(first, other) for other in others):
            return replace(mesh, data=few, z=1, hosts=tuple(first.tolist()))
    return mesh


def _in_order(hosts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Hosts by their numbers in ascending order."""
    _, numbers = np.unique(np.asarray(hosts), return_inverse=True)
    return numbers.reshape(-1)


@lru_cache(maxsize=128)
def _plan_of(crossing: Crossing, mesh: Mesh, network: Network, strategy: str, algorithm: str) -> ReshardPlan:
    """The plan of a crossing between all stages of `mesh`: the stages of a deep model ask for the same again."""
    source, destination, waves = crossing.tiles(mesh)
    size, names = crossing.dtype.itemsize, (strategy, algorithm)
    return make_plan(source, destination, size, mesh.hosts, *names, network=network, waves=waves)


@dataclass(frozen=True, slots=True)
class Reshard:
    """A crossing, and the plan by which it moves."""

    crossing: Crossing
    plan: ReshardPlan


_RESHARD = "fxpar_reshard"


def reshard_of(node: fx.Node) -> Reshard | None:
    """The reshard of the value that `node` moves between stages; None if `node` moves none."""
    return node.meta.get(_RESHARD)


def set_reshard(node: fx.Node, planned: Reshard) -> None:
    """Record the reshard of the value that `node` moves between stages."""
    node.meta[_RESHARD] = planned


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The step of one microbatch, from stage to stage.

    `module` calls the stages. `reshards` are all values that cross from one stage to another, in the order in which
    `module` moves them. `edges` are the same values in the form that schedules use.
    """

    module: fx.GraphModule
    edges: tuple[Edge, ...]
    reshards: tuple[Reshard, ...]

    def __str__(self) -> str:
        return "\n\n".join(f"{reshard.crossing.name}\n{reshard.plan}" for reshard in self.reshards)


_POSTED_IN_GROUPS = 1
"""One value is in flight while the one before it is computed with; more would only hold buffers, since a process group
moves one value after another."""


def lookahead_on(mesh: Mesh) -> int | None:
    """How many receives of an edge to post ahead: the argument of `fxpar.schedule.program.lower`."""
    return _POSTED_IN_GROUPS if mesh.moves_in_groups else None
