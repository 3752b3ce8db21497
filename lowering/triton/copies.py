"""The producer of gathered rows: copies by the copy engine, each followed by its signal, in the order of a ring."""

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

    Each copy is of memory in one piece, which copy engines do; it runs on the current stream, then its signal.
    """
    for segment in numbers:
        rows, rows_of_piece = segments.row_range(segment), segments.row_range_of_piece(segment)
        source = piece[rows_of_piece.start : rows_of_piece.stop]
        gathered[rows.start : rows.stop].copy_(source, non_blocking=True)
        set_signal(signals[segment : segment + 1], epoch)


def place_own(piece: Tensor, gathered: Tensor, signals: Tensor, segments: Segments, rank: int, epoch: int) -> None:
    """Put the rows that `rank` has itself into `gathered`, and set their signals, on the current stream."""
    pieces = segments.pieces
    gathered.view(pieces.outer, pieces.parts, -1)[:, rank].copy_(piece.view(pieces.outer, -1))
    signals[: segments.count].view(pieces.outer, pieces.parts, -1)[:, rank].fill_(epoch)


def beside(workspace: Workspace, work: Callable[[], None]) -> None:
    """Let the workspace's stream for copies do `work`, after all that the current stream has been told before."""
    workspace.copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(workspace.copies):
        work()


def pull(
    workspace: Workspace, half: Half, shared: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
) -> None:
    """Tell all ranks that what this one shares is there, and take from each what it shares, in turn.

    shared: what a rank shares, as this rank sees it. take: copies it. On the current stream.
    """
    own = workspace.rank
    for rank in ring_towards(own, workspace.parts):
        set_signal(half.ready(rank)[own : own + 1], half.epoch)
    for rank in ring_from(own, workspace.parts):
        await_signal(half.ready(own)[rank : rank + 1], half.epoch)
        take(rank, shared(rank))
