"""Copies of gathered rows by the copy engine, each followed by its signal, in the order of a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fxpar.lowering.triton.pieces import Segments, ring_from, ring_towards
from fxpar.lowering.triton.stream_signals import await_signal, set_signal
from fxpar.lowering.triton.workspace import Half, Workspace


def copy_segments(
    numbers: Iterable[int], segments: Segments, piece: Tensor, gathered: Tensor, signals: Tensor, epoch: int
) -> None:
    """Copy segments of a rank's `piece`, (outer * rows, columns), to their rows of `gathered`, (all rows, columns).

    Each copy is contiguous, so that a copy engine runs it. The current stream runs it, then sets its signal.
    """
    for segment in numbers:
        rows, rows_of_piece = segments.row_range(segment), segments.row_range_of_piece(segment)
        source = piece[rows_of_piece.start : rows_of_piece.stop]
        gathered[rows.start : rows.stop].copy_(source, non_blocking=True)
        set_signal(signals[segment : segment + 1], epoch)


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


def pull(
    workspace: Workspace, half: Half, shared: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
) -> None:
    """Signal to all ranks that this rank's shared tensor is ready, and copy those of the others in ring order.

    shared: maps a rank to its shared tensor. take: copies that. All on the current stream.
    """
    own = workspace.rank
    for rank in ring_towards(own, workspace.parts):
        set_signal(half.ready(rank)[own : own + 1], half.epoch)
    for rank in ring_from(own, workspace.parts):
        await_signal(half.ready(own)[rank : rank + 1], half.epoch)
        take(rank, shared(rank))
