"""Time transfers of tensors from some ranks of this world to others, and check the received values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.bench.measure.interleaved import TRIES, Sample, Timing, least_disturbed, median_ms, timings_of_ranks
from fxpar.bench.measure.processors import ProcessorUse
from fxpar.bench.report import Row
from fxpar.resharding.plan import ReshardPlan
from fxpar.resharding.tile import Tile, Tiles
from fxpar.transport.buffers import Buffers
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.route import Route
from fxpar.transport.routes import RouteSpec, open_routes
from fxpar.world.hosts import discover_hosts

DTYPE = torch.int32
_TIMEOUT = timedelta(seconds=120)
_NOT_ARRIVED = -1

Meet: TypeAlias = Callable[[], float]
"""A barrier of all ranks; returns the time of the common start, in seconds of `time.monotonic`."""

Share: TypeAlias = Callable[[ProcessorUse], float]
"""The share of the processors that other processes took; the same on all ranks, which must be on one machine."""


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A transfer of an int32 tensor of `shape` from the ranks of `source` to those of `destination`, all different.

    No two transfers of a run have both name and strategy in common.
    """

    name: str
    shape: tuple[int, ...]
    source: Tiles
    destination: Tiles
    plan: ReshardPlan
    repeats: int

    def __str__(self) -> str:
        return f"{self.name} by {self.plan.strategy}"


@dataclass(frozen=True, slots=True)
class Measured:
    """A transfer, and the timings of its repeats, each until its last rank was done."""

    transfer: TimedTransfer
    timings: Sequence[Timing]

    @property
    def strategy(self) -> str:
        """The strategy of the transfer."""
        return self.transfer.plan.strategy

    @property
    def seconds(self) -> Sequence[float]:
        """The times of all repeats."""
        return [timing.seconds for timing in self.timings]

    @property
    def median_s(self) -> float:
        """The median time of the repeats that count."""
        return median_ms(self.timings) / 1e3

    def times(self) -> Row:
        """The times of the repeats, as columns of a report."""
        return {
            "repeats": len(self.seconds),
            "median_s": self.median_s,
            "least_s": min(self.seconds),
            "most_s": max(self.seconds),
        }


def time_transfers(
    transfers: Sequence[TimedTransfer],
    device: torch.device,
    meet: Meet,
    share: Share | None = None,
    tries: int = TRIES,
) -> list[list[Sample]]:
    """For each transfer, samples of its repeats: from the common start until this rank was done.

    A collective of all ranks, with the same transfers. Transfers alternate, after one round that does not count.
    Receives are posted before the ranks meet. Pieces are on `device`. With `share`, a disturbed repeat runs up to
    `tries` times.
    """
    parts = _parts(transfers, device)
    samples: list[list[Sample]] = [[] for _ in transfers]
    for turn in range(1 + max(transfer.repeats for transfer in transfers)):
        for transfer, part, found in zip(transfers, parts, samples, strict=True):
            if turn <= transfer.repeats:
                found.append(least_disturbed(partial(_sample, part, meet, share), tries if turn else 1))
    return [found[1:] for found in samples]


def measured(transfers: Sequence[TimedTransfer], by_rank: Sequence[Sequence[Sequence[Sample]]]) -> list[Measured]:
    """The transfers with their timings, from the results of `time_transfers` on each rank."""
    by_name = [{str(transfer): found for transfer, found in zip(transfers, rank, strict=True)} for rank in by_rank]
    timings = timings_of_ranks(by_name)
    return [Measured(transfer, timings[str(transfer)]) for transfer in transfers]


def _sample(part: _Part, meet: Meet, share: Share | None) -> Sample:
    if share is None:
        return Sample(part.run(meet), others=0.0)
    before = ProcessorUse.now()
    seconds = part.run(meet)
    return Sample(seconds, share(ProcessorUse.now().since(before)))


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part in a transfer: it sends `held`, if that is not None, and expects `needed`, which may be empty."""

    transfer: TimedTransfer
    route: Route
    held: Tensor | None
    needed: Tensor

    def run(self, meet: Meet) -> float:
        """Seconds of one repeat."""
        piece = torch.full_like(self.needed, _NOT_ARRIVED)
        receipt = self.route.post_receive(piece, 0)
        start = meet()
        shipment = None if self.held is None else self.route.send(self.held, 0)
        self.route.wait(receipt)
        if shipment is not None:
            self.route.complete(shipment)
        self.route.finish()
        if piece.is_cuda:
            torch.cuda.synchronize(piece.device)  # on GPUs, waits are only enqueued
        seconds = time.monotonic() - start
        assert torch.equal(piece, self.needed), f"{self.transfer}: rank {dist.get_rank()} has wrong values"
        return seconds


def _parts(transfers: Sequence[TimedTransfer], device: torch.device) -> list[_Part]:
    rank = dist.get_rank()
    assert all(transfer.plan.hosts == discover_hosts() for transfer in transfers), "planned for other hosts"
    tiles = [(transfer.source.get(rank), transfer.destination.get(rank)) for transfer in transfers]
    moves = [
        RouteSpec(move.plan, Endpoint(str(move), rank, *own, DTYPE)) for move, own in zip(transfers, tiles, strict=True)
    ]
    routes = open_routes(moves, Buffers(device), 1, _TIMEOUT)
    parts = []
    for transfer, route, (held, needed) in zip(transfers, routes, tiles, strict=True):
        value = None if held is None else numbered(transfer.shape, held).to(device)
        wanted = torch.empty(0, dtype=DTYPE) if needed is None else numbered(transfer.shape, needed)
        parts.append(_Part(transfer, route, value, wanted.to(device)))
    return parts


@cache  # transfers of one tensor have the same pieces
def numbered(shape: tuple[int, ...], tile: Tile) -> Tensor:
    """The piece `tile` of a tensor of `shape`, each of whose elements is its own row-major index."""
    piece = torch.zeros(tile.shape, dtype=DTYPE)
    stride = 1
    for dim in reversed(range(len(shape))):
        indices = [torch.arange(*interval, dtype=DTYPE) for interval in tile.ranges[dim]]
        piece += (torch.cat(indices or [piece.new_empty(0)]) * stride).view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return piece
