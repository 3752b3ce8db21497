"""The resharding problems of Zhuang et al., section 5: nine cases (Table 2), and one device to many."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from fxpar.resharding.tile import Interval, Tile, Tiles

ITEMSIZE = 4
"""Bytes of an int32."""


@dataclass(frozen=True, slots=True)
class CaseMesh:
    """How a tensor is sharded over a mesh of (hosts, devices per host).

    `spec` has for every dim the mesh axes that shard it, one after another: 0 is the hosts, 1 the devices of a host.
    """

    mesh: tuple[int, int]
    spec: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh)

    def tiles(self, shape: Sequence[int], ranks: Sequence[int]) -> dict[int, Tile]:
        """The tile of a tensor of `shape` on each of `ranks`, which are in the order of hosts."""
        places = product(*map(range, self.mesh))
        return {rank: self._tile(shape, place) for rank, place in zip(ranks, places, strict=True)}

    def _tile(self, shape: Sequence[int], place: Sequence[int]) -> Tile:
        ranges: list[tuple[Interval, ...]] = []
        for size, axes in zip(shape, self.spec, strict=True):
            start, stop = 0, size
            for axis in axes:
                width = -(-(stop - start) // self.mesh[axis])
                start, stop = min(start + place[axis] * width, stop), min(start + (place[axis] + 1) * width, stop)
            ranges.append(((start, stop),) if start < stop else ())
        return Tile(tuple(ranges))


@dataclass(frozen=True, slots=True)
class CaseTransfer:
    """A tensor of int32 that moves from one mesh to a mesh of other hosts."""

    name: str
    shape: tuple[int, ...]
    source: CaseMesh
    destination: CaseMesh

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of every rank; the source's come first."""
        (_, devices), (first_host, source_devices) = self.destination.mesh, self.source.mesh
        of_source = [rank // source_devices for rank in range(self.source.num_ranks)]
        of_destination = [first_host + rank // devices for rank in range(self.destination.num_ranks)]
        return (*of_source, *of_destination)

    def tiles(self) -> tuple[Tiles, Tiles]:
        """The tiles that the source's ranks hold, and those that the destination's need."""
        first = self.source.num_ranks
        needed = self.destination.tiles(self.shape, range(first, first + self.destination.num_ranks))
        return self.source.tiles(self.shape, range(first)), needed


@dataclass(frozen=True, slots=True)
class Case(CaseTransfer):
    """A crossing that the paper measures.

    `bound` is the lower bound, which the best schedule reaches; `naive` and `balance` are the makespans of the paper's
    two simple algorithms. Their unit is the bytes of the whole tensor.
    """

    bound: Fraction
    naive: Fraction
    balance: Fraction


def _end(text: str, mesh: tuple[int, int]) -> CaseMesh:
    """Parse the paper's notation: RS01R replicates all dims but the second, which is sharded by hosts, then devices."""
    return CaseMesh(mesh, tuple(tuple(map(int, dim[1:])) for dim in re.findall(r"R|S[01]+", text)))


def _case(number: int, shape: tuple[int, ...], source: CaseMesh, destination: CaseMesh, *times: str) -> Case:
    return Case(str(number), shape, source, destination, *map(Fraction, times))


_SHAPE = (1024, 1024, 512)

# The paper's Table 2. The times there are measured; those here follow from the paper's model (section 3).
NINE_CASES = (
    #                                                                                     bound, naive, balance
    _case(1, _SHAPE, _end("S0RR", (2, 4)), _end("S0RR", (2, 4)), "1/2", "1/2", "1/2"),
    _case(2, _SHAPE, _end("RRR", (2, 4)), _end("S0RR", (2, 4)), "1/2", "1", "1/2"),
    _case(3, _SHAPE, _end("RS0R", (2, 4)), _end("S0RR", (2, 4)), "1/2", "3/4", "3/4"),
    _case(4, _SHAPE, _end("RS01R", (2, 4)), _end("S01RR", (2, 4)), "1/2", "15/16", "15/16"),
    _case(5, _SHAPE, _end("S1RR", (2, 4)), _end("S0RR", (2, 4)), "1/2", "1", "3/4"),
    _case(6, (3072, 1024, 170), _end("S0RR", (2, 4)), _end("S0RR", (3, 4)), "1/2", "1", "2/3"),
    _case(7, _SHAPE, _end("S1RR", (1, 4)), _end("RRR", (2, 4)), "1", "1", "1"),
    _case(8, _SHAPE, _end("RRR", (2, 3)), _end("RRR", (3, 2)), "1", "1", "1"),
    _case(9, _SHAPE, _end("RS0R", (2, 4)), _end("RRS0", (2, 4)), "1/2", "3/4", "3/4"),
)

# From one device to all of a mesh, 1 GiB.
ONE_TO_MANY = tuple(
    Case(f"to {hosts}x{devices}", (2**28,), _end("R", (1, 1)), _end("R", (hosts, devices)), *[Fraction(1)] * 3)
    for hosts, devices in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))
)
