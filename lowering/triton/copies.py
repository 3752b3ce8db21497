"""Copies of gathered rows by the copy engine, each followed by its signal, in the order of a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.lowering.triton.pieces import Segments, ring_from, ring_towards
from fxpar.lowering.triton.stream_signals import await_signal, set_signal
from fxpar.lowering.triton.workspace import Half, Workspace


def copy_segments(to: Sequence[Tensor], sources: Sequence[Tensor], signals: Sequence[Tensor], epoch: int) -> None:
    """Copy each of `sources` to its place, and then set its signal, on the current stream.

    Each copy is contiguous, so that a copy engine runs it.
    """
    for place, source, signal in zip(to, sources, signals, strict=True):
        place.copy_(source, non_blocking=True)
        set_signal(signal, epoch)


def segments_of_piece(piece: Tensor, segments: Segments, rank: int) -> tuple[Tensor, ...]:
    """The segments of the piece of `rank`, (outer * rows, columns), in order."""
    found: tuple[Tensor, ...] = piece.split([len(segments.row_range(segment)) for segment in segments.of_rank(rank)])
    return found


def place_own(piece: Tensor, gathered: Tensor, signals: Tensor, segments: Segments, rank: int, epoch: int) -> None:
    """Copy the own rows of `rank` to `gathered`, and set their signals, on the current stream."""
    pieces = segments.pieces
    gathered.view(pieces.outer, pieces.parts, -1)[:, rank].copy_(piece.view(pieces.outer, -1))
    signals[: segments.count].view(pieces.outer, pieces.parts, -1)[:, rank].fill_(epoch)


def on_copy_stream(workspace: Workspace, work: Callable[[], None]) -> None:
    """Run `work` on the workspace's stream for copies, after everything queued on the current stream so far."""
    workspace.copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(workspace.copies):
        work()


@dataclass(frozen=True, slots=True)
class Shared:
    """What the ranks share in half of a workspace.

    announced: this rank's signal on each of the others. awaited: each other rank with its signal on this one, and with
    what it shares. In ring order. own: what this rank shares.
    """

    announced: tuple[Tensor, ...]
    awaited: tuple[tuple[int, Tensor, Tensor], ...]
    own: Tensor

    @classmethod
    def of(cls, workspace: Workspace, half: Half, shared: Callable[[int], Tensor]) -> Shared:
        """shared: maps a rank to its shared tensor."""
        own, parts = workspace.rank, workspace.parts
        ready = half.ready(own)
        return cls(
            tuple(half.ready(rank)[own : own + 1] for rank in ring_towards(own, parts)),
            tuple((rank, ready[rank : rank + 1], shared(rank)) for rank in ring_from(own, parts)),
            shared(own),
        )


def pull(shared: Shared, epoch: int, take: Callable[[int, Tensor], None]) -> None:
    """Signal to all ranks that this rank's shared tensor is ready, and copy those of the others with `take`.

    All on the current stream.
    """
    for signal in shared.announced:
        set_signal(signal, epoch)
    for rank, signal, theirs in shared.awaited:
        await_signal(signal, epoch)
        take(rank, theirs)
