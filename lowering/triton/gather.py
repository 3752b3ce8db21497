"""`all_gather_matmul` on GPUs of one host that can write to each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from fxpar.lowering.triton.copies import Shared, copy_segments, on_copy_stream, place_own, pull, segments_of_piece
from fxpar.lowering.triton.factors import as_matrices, dense
from fxpar.lowering.triton.launch import Arrival, gathered_call
from fxpar.lowering.triton.pieces import Pieces, Segments, ring_towards
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.workspace import Half, Workspace

FORMS = ("rows", "columns", "matrices")
"""The forms whose products are computed row by row as rows arrive; a sum over the gathered dim needs all of it."""


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather of every rank's `shard` into a value of `shape`, with these pieces of its rows."""

    shard: Tensor
    shape: tuple[int, ...]
    pieces: Pieces

    @classmethod
    def of(cls, shard: Tensor, form: str, outer: int, parts: int) -> Gather:
        """For a shard of one of `FORMS`; see `fxpar.ir.fused_ops.all_gather_matmul`."""
        shape = list(shard.shape)
        if form == "matrices":
            shape[0] *= parts
            pieces = Pieces(outer, parts, shard.shape[0] // outer * shard.shape[1])
        else:
            shape[-2] *= parts
            matrices = shard.shape[0] if shard.dim() == 3 else 1
            pieces = Pieces(matrices * outer, parts, shard.shape[-2] // outer)
        return cls(shard, tuple(shape), pieces)


def gather_and_multiply(
    gather: Gather, others: Sequence[Tensor], biases: Sequence[Tensor | None], form: str, how: Fused, to: Workspace
) -> tuple[list[Tensor], Tensor]:
    """The products with `others`, and the gathered value, which the call after the next may overwrite."""
    segments = Segments(gather.pieces, how.segment_rows)
    gathered, arrival = (_push if how.pushes else _pull)(gather, segments, to)
    return [
        multiply(gathered.view(gather.shape), other, bias, form, arrival, how)
        for other, bias in zip(others, biases, strict=True)
    ], gathered.view(gather.shape)


def multiply(gathered: Tensor, other: Tensor, bias: Tensor | None, form: str, arrival: Arrival, how: Fused) -> Tensor:
    """The product, in one of `FORMS`, of `other` and a gathered value whose rows are still arriving."""
    left, right = as_matrices(gathered), dense(as_matrices(other))
    if form == "columns":
        out = gathered.new_empty(*other.shape[:-1], gathered.shape[-2])
        right, product = right.mT, as_matrices(out).mT
        terms = None if bias is None else as_matrices(bias.expand(out.shape)).mT
    else:
        out = gathered.new_empty(*gathered.shape[:-1], other.shape[-1])
        product = as_matrices(out)
        terms = None if bias is None else as_matrices(bias.expand(out.shape))
    gathered_call(left, right, terms, product, arrival, how.tiling).run(how.programs(gathered.device))
    return out


@dataclass(frozen=True, slots=True)
class _Pull:
    """How shards are pulled in half of a workspace. sources, signals: by rank, of its segments."""

    shared: Shared
    sources: Sequence[Sequence[Tensor]]
    signals: Sequence[Sequence[Tensor]]
    own_signals: Tensor

    @classmethod
    def of(cls, shard: Tensor, segments: Segments, workspace: Workspace, half: Half) -> _Pull:
        """For shards of the shape of `shard`, (rows, columns)."""

        def shared(rank: int) -> Tensor:
            return half.data(rank, shard.dtype, *shard.shape)

        ranks, signals = range(workspace.parts), half.signals(workspace.rank)
        return cls(
            Shared.of(workspace, half, shared),
            [segments_of_piece(shared(rank), segments, rank) for rank in ranks],
            [_signals_of(rank, segments, signals) for rank in ranks],
            signals,
        )


def _pull(gather: Gather, segments: Segments, workspace: Workspace) -> tuple[Tensor, Arrival]:
    """Every rank shares its shard, and copies those of the others."""
    shard = gather.shard.reshape(-1, gather.shard.shape[-1])
    half = workspace.begin(shard.nbytes, signals=segments.count)
    prepared = workspace.prepared(half, _Pull, shard, segments, lambda: _Pull.of(shard, segments, workspace, half))
    gathered = shard.new_empty(len(shard) * workspace.parts, shard.shape[1])
    to = gathered.split(_sizes(segments))

    def take(rank: int, piece: Tensor) -> None:
        places = [to[segment] for segment in segments.of_rank(rank)]
        copy_segments(places, prepared.sources[rank], prepared.signals[rank], half.epoch)

    prepared.shared.own.copy_(shard)
    place_own(shard, gathered, prepared.own_signals, segments, workspace.rank, half.epoch)
    on_copy_stream(workspace, lambda: pull(prepared.shared, half.epoch, take))
    return gathered, Arrival(prepared.own_signals, half.epoch, segments, workspace.rank, workspace.tickets)


@dataclass(frozen=True, slots=True)
class _Push:
    """How shards are pushed in half of a workspace: the places of this rank's segments on all others, in ring order."""

    gathered: Tensor
    own_signals: Tensor
    sources: Sequence[Tensor]
    to: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]
    """Places and their signals."""

    @classmethod
    def of(cls, shard: Tensor, segments: Segments, workspace: Workspace, half: Half) -> _Push:
        """For shards of the shape of `shard`, (rows, columns)."""
        own, parts, numbers = workspace.rank, workspace.parts, list(segments.of_rank(workspace.rank))

        def places(rank: int) -> list[Tensor]:
            gathered = half.data(rank, shard.dtype, len(shard) * parts, shard.shape[1]).split(_sizes(segments))
            return [gathered[segment] for segment in numbers]

        return cls(
            half.data(own, shard.dtype, len(shard) * parts, shard.shape[1]),
            half.signals(own),
            places(own),
            [(places(rank), _signals_of(own, segments, half.signals(rank))) for rank in ring_towards(own, parts)],
        )


def _push(gather: Gather, segments: Segments, workspace: Workspace) -> tuple[Tensor, Arrival]:
    """Every rank copies its shard into the memory of the others."""
    shard = gather.shard.reshape(-1, gather.shard.shape[-1])
    half = workspace.begin(shard.nbytes * workspace.parts, signals=segments.count)
    prepared = workspace.prepared(half, _Push, shard, segments, lambda: _Push.of(shard, segments, workspace, half))
    place_own(shard, prepared.gathered, prepared.own_signals, segments, workspace.rank, half.epoch)

    def send() -> None:
        for places, signals in prepared.to:
            copy_segments(places, prepared.sources, signals, half.epoch)

    on_copy_stream(workspace, send)
    return prepared.gathered, Arrival(prepared.own_signals, half.epoch, segments, workspace.rank, workspace.tickets)


@lru_cache(maxsize=1024)
def _sizes(segments: Segments) -> list[int]:
    return [len(segments.row_range(segment)) for segment in range(segments.count)]


def _signals_of(rank: int, segments: Segments, signals: Tensor) -> list[Tensor]:
    return [signals[segment : segment + 1] for segment in segments.of_rank(rank)]
