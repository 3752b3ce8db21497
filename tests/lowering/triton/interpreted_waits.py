"""Kernels wait for all they need, in Triton's interpreter: run by test_interpreted.py in a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from fxpar.lowering.triton.launch import Arrival, Sum, gathered_call, scattered_call, wrapped
from fxpar.lowering.triton.pieces import Pieces, Segments, ring_from, row_tiles, signals_of_owner
from tests.lowering.triton.kernel_inputs import SMALL, no_tickets
from tests.lowering.triton.owners import Owners
from tests.lowering.triton.products import assert_product, factor

OnLook: TypeAlias = Callable[[Tensor, Collection[int], Callable[[int], None]], list[int]]


@pytest.fixture
def on_second_look(monkeypatch: pytest.MonkeyPatch) -> OnLook:
    """A producer that sends only what a kernel waits for, and only when it looks for it a second time.

    Given signals, those that are missing, and what sends the segment of each, it returns a list that will hold what
    was sent, in that order.
    """

    def produce(signals: Tensor, missing: Collection[int], send: Callable[[int], None]) -> list[int]:
        looks: Counter[int] = Counter()
        sent: list[int] = []
        look = interpreter_builder.create_atomic_rmw

        def look_and_send(op: Any, pointer: Any, *rest: Any) -> Any:
            segment = (int(pointer.data.item()) - signals.data_ptr()) // signals.element_size()
            looks[segment] += 1
            if looks[segment] == 2 and segment in missing:
                send(segment)
                sent.append(segment)
            return look(op, pointer, *rest)

        monkeypatch.setattr(interpreter_builder, "create_atomic_rmw", look_and_send)
        return sent

    return produce


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("outer", "rows", "segment_rows"), [(1, 16, 16), (1, 16, 5), (1, 21, 8), (2, 9, 4), (3, 4, 4)])
def test_tiles_wait_for_all_they_need_in_the_order_of_the_ring(
    rank: int, outer: int, rows: int, segment_rows: int, on_second_look: OnLook
) -> None:
    pieces = Pieces(outer, 4, rows)
    segments = Segments(pieces, segment_rows)
    out, gathered, right, sent = multiply_what_arrives(segments, rank, 7, on_second_look)
    assert_product(out, gathered, right)
    own = set(segments.of_rank(rank))
    assert sorted(sent) == [segment for segment in range(segments.count) if segment not in own]
    if outer == 1 and rows >= SMALL.m:
        senders = dict.fromkeys(pieces.owner(segments.row_range(segment)[0]) for segment in sent)
        assert list(senders) == list(ring_from(rank, 4))


@pytest.mark.parametrize("epoch", [1, 2, 3, 2**31 - 1, 2**31, 2**32])
def test_a_later_epoch_needs_new_signals_but_no_reset_and_may_wrap_around(epoch: int, on_second_look: OnLook) -> None:
    out, gathered, right, _ = multiply_what_arrives(Segments(Pieces(1, 2, 4), 4), 0, epoch, on_second_look)
    assert_product(out, gathered, right)


def multiply_what_arrives(
    segments: Segments, rank: int, epoch: int, on_second_look: OnLook
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The product, its factors, and which segments were waited for; what nobody waits for is no number."""
    num_rows = segments.pieces.blocks * segments.pieces.rows
    gathered, right = factor(1, num_rows, 8), factor(1, 8, 20, seed=1)
    buffer, out = torch.full_like(gathered, torch.nan), torch.full((1, num_rows, 20), torch.nan)
    signals = torch.full((segments.count,), wrapped(epoch - 1), dtype=torch.int32)

    def send(segment: int) -> None:
        rows = segments.row_range(segment)
        buffer[:, rows.start : rows.stop] = gathered[:, rows.start : rows.stop]
        signals[segment] = wrapped(epoch)

    own = set(segments.of_rank(rank))
    for segment in own:
        send(segment)
    sent = on_second_look(signals, set(range(segments.count)) - own, send)
    tickets = no_tickets()
    gathered_call(buffer, right, None, out, Arrival(signals, epoch, segments, rank, tickets), SMALL).run(2)
    assert tickets.item() == 0
    return out, gathered, right, sent


def test_each_tile_of_a_sum_waits_for_every_rank_and_resets_its_counter(on_second_look: OnLook) -> None:
    owners = Owners(Pieces(1, 3, 20), 20, 32, torch.float32)
    left, right = factor(1, 60, 8), factor(1, 8, 32, seed=1)
    counters, signals = owners.counters[1], signals_of_owner(list(row_tiles(1, 60, SMALL.m)), owners.pieces, 1, SMALL.m)

    def send(tile: int) -> None:
        rows, columns = (slice(16 * place, 16 * (place + 1)) for place in divmod(tile, 2))
        for source in (0, 2):
            owners.memory[1, source, :20][rows, columns] = 10.0**source
            counters[tile] += signals[tile // 2]

    sent = on_second_look(counters, range(4), send)
    out = torch.full((20, 32), torch.nan)
    to = owners.destinations(1, (32, 1))
    scattered_call(left, right, None, to, SMALL, Sum(owners.memory[1].flatten(1), out)).run(2)
    assert_product(out, left[0, 20:40], right[0], torch.tensor([101.0]), terms=3)
    assert sorted(sent) == [0, 1, 2, 3]
    assert not counters.any() and not to.tickets.any()
