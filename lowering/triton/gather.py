"""`all_gather_matmul` on GPUs of one host that can write to each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpar.lowering.triton.copies import copy_segments, on_copy_stream, place_own, pull
from fxpar.lowering.triton.factors import as_matrices, dense
from fxpar.lowering.triton.launch import Arrival, gathered_call
from fxpar.lowering.triton.pieces import Pieces, Segments, ring_towards
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.stream_signals import set_signal
from fxpar.lowering.triton.workspace import Workspace

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


def _pull(gather: Gather, segments: Segments, workspace: Workspace) -> tuple[Tensor, Arrival]:
    """Every rank shares its shard, and copies those of the others."""
    shard = gather.shard.reshape(-1, gather.shard.shape[-1])
    half = workspace.begin(shard.nbytes, signals=segments.count)
    signals = half.signals(workspace.rank)
    gathered = shard.new_empty(len(shard) * workspace.parts, shard.shape[1])

    def shared(rank: int) -> Tensor:
        return half.data(rank, shard.dtype, *shard.shape)

    def take(rank: int, piece: Tensor) -> None:
        copy_segments(segments.of_rank(rank), segments, piece, gathered, signals, half.epoch)

    shared(workspace.rank).copy_(shard)
    place_own(shard, gathered, signals, segments, workspace.rank, half.epoch)
    on_copy_stream(workspace, lambda: pull(workspace, half, shared, take))
    return gathered, Arrival(signals, half.epoch, segments, workspace.rank, workspace.tickets)


def _push(gather: Gather, segments: Segments, workspace: Workspace) -> tuple[Tensor, Arrival]:
    """Every rank copies its shard into the memory of the others."""
    shard = gather.shard.reshape(-1, gather.shard.shape[-1])
    shape = (len(shard) * workspace.parts, shard.shape[1])
    half = workspace.begin(shard.nbytes * workspace.parts, signals=segments.count)
    own, signals = workspace.rank, half.signals(workspace.rank)
    gathered = half.data(own, shard.dtype, *shape)
    place_own(shard, gathered, signals, segments, own, half.epoch)

    def send() -> None:
        for rank in ring_towards(own, workspace.parts):
            there, their_signals = half.data(rank, shard.dtype, *shape), half.signals(rank)
            for segment in segments.of_rank(own):
                rows = segments.row_range(segment)
                there[rows.start : rows.stop].copy_(gathered[rows.start : rows.stop])
                set_signal(their_signals[segment : segment + 1], half.epoch)

    on_copy_stream(workspace, send)
    return gathered, Arrival(signals, half.epoch, segments, own, workspace.tickets)
