"""Mistakes that a change could bring into the fused ops; tests on simulated GPUs must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor

from fxpar.lowering.triton import copies, gather, gather_kernel, launch, scatter, scatter_kernel
from fxpar.lowering.triton.workspace import Half, Workspace
from tests.lowering.triton.simulated_gpu import Stream


@contextmanager
def _replaced(*places: tuple[object, str, object]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, instead in places:
            stack.enter_context(patch.object(owner, name, instead))
        yield


def tiles_do_not_wait_for_rows() -> Any:
    """A tile is computed before its rows have arrived."""
    return _replaced((gather_kernel, "wait_until", lambda signal, at_least: 0))


def tiles_wait_for_their_first_segment_only() -> Any:
    """A tile that touches several segments waits for the first."""
    wait = gather_kernel.wait_for_rows

    def wait_for_first_row(signals: Any, first: Any, last: Any, *rest: Any) -> Any:
        return wait(signals, first, first, *rest)

    return _replaced((gather_kernel, "wait_for_rows", wait_for_first_row))


def sums_do_not_wait_for_pieces() -> Any:
    """Pieces are summed before all ranks have stored theirs."""
    return _replaced((scatter_kernel, "wait_until", lambda signal, at_least: 0))


def counters_are_not_reset() -> Any:
    """A sum leaves its counter as it is, so that one of a later call in the same half need not wait for all pieces."""
    sum_tile = scatter_kernel.sum_tile

    def sum_and_count_again(pieces: Any, out: Any, counter: Any, target: Any, *rest: Any) -> None:
        sum_tile(pieces, out, counter, target, *rest)
        tl.atomic_add(counter, target)

    return _replaced((scatter_kernel, "sum_tile", sum_and_count_again))


def shards_are_read_before_they_are_ready() -> Any:
    """A rank copies what another shares without awaiting its signal."""
    return _replaced((copies, "await_signal", lambda signal, value: None))


def copies_do_not_wait_for_the_kernels_before() -> Any:
    """The stream for copies shares what the current stream has not yet computed."""

    def at_once(workspace: Workspace, work: Callable[[], None]) -> None:
        with torch.cuda.stream(workspace.copies):
            work()

    return _replaced((gather, "on_copy_stream", at_once), (scatter, "on_copy_stream", at_once))


def results_do_not_wait_for_copies() -> Any:
    """The current stream goes on before the copies to a result are done."""
    wait = Stream.wait_stream

    def unless_main(stream: Stream, other: Stream) -> None:
        if not stream.is_main:
            wait(stream, other)

    return _replaced((Stream, "wait_stream", unless_main))


def signals_overtake_copies() -> Any:
    """A signal is set when the host asks for it, not when the copy before it is done."""

    def at_once(signal: Tensor, value: int) -> None:
        signal.numpy()[0] = launch.wrapped(value)

    return _replaced((copies, "set_signal", at_once))


def a_signal_is_left_out() -> Any:
    """The last segment of a rank is neither copied nor signalled."""
    copy = copies.copy_segments

    def copy_all_but_last(to: Any, sources: Any, signals: Any, epoch: int) -> None:
        copy(to[:-1], sources[:-1], signals[:-1], epoch)

    return _replaced((gather, "copy_segments", copy_all_but_last))


def signals_of_an_earlier_call_count() -> Any:
    """What was signalled in the same half two calls ago is taken for a signal of this call."""
    arrival = launch.Arrival
    return _replaced(
        (gather, "Arrival", lambda signals, epoch, *rest: arrival(signals, epoch - 2, *rest)),
    )


def all_calls_use_one_half() -> Any:
    """A call writes to the half that the call before it may still be read from."""
    begin = Workspace.begin

    def begin_two(workspace: Workspace, num_bytes: int, **counts: int) -> Half:
        workspace._epoch += 1
        return begin(workspace, num_bytes, **counts)

    return _replaced((Workspace, "begin", begin_two))


def halves_overlap() -> Any:
    """The second half begins before the first ends."""
    begin = Workspace.begin

    def begin_early(workspace: Workspace, num_bytes: int, **counts: int) -> Half:
        half = begin(workspace, num_bytes, **counts)
        return replace(half, offset=half.offset and half.offset - 256)

    return _replaced((Workspace, "begin", begin_early))
