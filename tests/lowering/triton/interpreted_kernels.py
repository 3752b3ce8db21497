"""What kernels compute, in Triton's interpreter: run by test_interpreted.py in a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from itertools import product
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from fxpar.ir.tiles import LogicalBox
from fxpar.lowering.triton.gather import Gather, multiply
from fxpar.lowering.triton.launch import (
    Arrival,
    Destinations,
    gathered_call,
    places_of,
    scattered_call,
    sum_call,
    sum_programs,
    uniform_call,
    uniform_programs,
    wrapped,
)
from fxpar.lowering.triton.pieces import Pieces, Segments, ring_from, row_tiles, signals_of_owner
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.scatter import Product
from fxpar.lowering.triton.tile import place_of_tile
from fxpar.lowering.triton.tiling import DTYPES, Tiling
from tests.lowering.triton.products import assert_product, factor

SMALL = Tiling(16, 16, 16, warps=4, stages=2, band=1)
WIDE = Tiling(32, 16, 32, warps=4, stages=2, band=3)
BY_DESCRIPTORS = Tiling(16, 16, 16, warps=4, stages=2, descriptors=True)


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


def there_at(segments: Segments, rank: int, epoch: int = 1) -> Arrival:
    """All rows have arrived."""
    return Arrival(torch.full((segments.count,), epoch, dtype=torch.int32), epoch, segments, rank)


def gathered_product(
    gathered: Tensor, right: Tensor, arrival: Arrival, tiling: Tiling = SMALL, bias: Tensor | None = None
) -> Tensor:
    """By the kernel, into memory that holds no numbers; (matrices, rows, columns)."""
    out = torch.full((gathered.shape[0], gathered.shape[1], right.shape[2]), torch.nan, dtype=gathered.dtype)
    gathered_call(gathered, right, bias, out, arrival, tiling).run(3)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "terms", "columns"), [(5, 19, 21), (16, 32, 16), (1, 1, 1), (20, 7, 3)])
def test_a_gathered_product_is_right_for_any_sizes(dtype: torch.dtype, rows: int, terms: int, columns: int) -> None:
    gathered, right = factor(1, 4 * rows, terms, dtype=dtype), factor(1, terms, columns, dtype=dtype, seed=1)
    for tiling in (SMALL, WIDE):
        found = gathered_product(gathered, right, there_at(Segments(Pieces(1, 4, rows), 3), 1), tiling)
        assert_product(found, gathered, right)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_loaded_by_descriptors_give_the_same_bits(dtype: torch.dtype, transposed: bool) -> None:
    gathered, right = factor(1, 40, 24, dtype=dtype), factor(1, 24, 24, dtype=dtype, seed=1)
    right = right.mT if transposed else right
    arrival = there_at(Segments(Pieces(1, 4, 10), 4), 2)
    assert gathered_product(gathered, right, arrival, BY_DESCRIPTORS).equal(
        gathered_product(gathered, right, arrival, SMALL)
    )


@pytest.mark.parametrize("shape", [(1,), (21,), (20, 1), (20, 21), (1, 1, 21), (2, 20, 21)])
def test_a_bias_of_any_shape_is_added(shape: tuple[int, ...]) -> None:
    gathered, right = factor(2, 20, 9), factor(2, 9, 21, seed=1)
    bias = factor(*shape, seed=2).expand(2, 20, 21)
    found = gathered_product(gathered, right, there_at(Segments(Pieces(4, 2, 5), 2), 1), WIDE, bias)
    assert_product(found, gathered, right, bias)


def test_results_may_lie_in_memory_in_any_order() -> None:
    gathered, right = factor(1, 20, 9), factor(1, 9, 21, seed=1)
    out = torch.full((1, 21, 20), torch.nan).mT
    gathered_call(gathered, right, None, out, there_at(Segments(Pieces(1, 4, 5), 5), 0), SMALL).run(2)
    assert_product(out, gathered, right)


def test_neither_rank_nor_segments_change_a_bit() -> None:
    gathered, right = factor(1, 44, 20, dtype=torch.float16), factor(1, 20, 9, dtype=torch.float16, seed=1)
    pieces = Pieces(1, 4, 11)
    expected = gathered_product(gathered, right, there_at(Segments(pieces, 11), 0))
    for rank, rows in product((0, 1, 3), (1, 4, 11)):
        assert gathered_product(gathered, right, there_at(Segments(pieces, rows), rank)).equal(expected)


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
    gathered_call(buffer, right, None, out, Arrival(signals, epoch, segments, rank), SMALL).run(2)
    return out, gathered, right, sent


class Owners:
    """The memory of all ranks, which holds no numbers, with guards around the pieces."""

    def __init__(self, pieces: Pieces, rows_of_piece: int, columns: int, dtype: torch.dtype) -> None:
        self.pieces = pieces
        self.memory = torch.full((pieces.parts, pieces.parts, rows_of_piece + 1, columns), torch.nan, dtype=dtype)
        self.counters = torch.zeros(pieces.parts, pieces.parts, dtype=torch.int32)

    def destinations(self, rank: int, strides: tuple[int, int]) -> Destinations:
        pieces = (self.memory[owner, rank].data_ptr() for owner in range(self.pieces.parts))
        places = torch.tensor(places_of(pieces, self.memory))
        counters = torch.tensor([self.counters[owner, rank].data_ptr() for owner in range(self.pieces.parts)])
        return Destinations(self.memory, places, counters, self.pieces, rank, strides)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outer", "rows", "terms", "columns"), [(1, 16, 16, 16), (1, 5, 19, 24), (3, 7, 3, 8)])
def test_a_scattered_product_is_summed_by_owners(
    dtype: torch.dtype, outer: int, rows: int, terms: int, columns: int
) -> None:
    pieces = Pieces(outer, 4, rows)
    owners = Owners(pieces, outer * rows, columns, dtype)
    lefts = [factor(1, pieces.blocks * rows, terms, dtype=dtype, seed=rank) for rank in range(4)]
    rights = [factor(1, terms, columns, dtype=dtype, seed=10 + rank) for rank in range(4)]
    biases = [factor(columns, dtype=dtype, seed=20 + rank).expand(1, pieces.blocks * rows, -1) for rank in range(4)]
    for rank, factors in enumerate(zip(lefts, rights, biases, strict=True)):
        scattered_call(*factors, owners.destinations(rank, (columns, 1)), SMALL).run(3)
    signals = signals_of_owner_of(pieces, SMALL, columns)
    ones = torch.ones(1, pieces.blocks * rows, 1)
    whole_left = torch.cat([*lefts, *[ones] * 4], dim=-1).double()
    whole_right = torch.cat([*rights, *[bias[:, :1] for bias in biases]], dim=-2).double()
    for owner in range(4):
        out = torch.full((outer * rows, columns), torch.nan, dtype=dtype)
        piece = owners.memory[owner].flatten(1)
        sum_call(piece, out, owners.counters[owner], signals(owner)).run(sum_programs(out))
        expected_left = whole_left.view(outer, 4, rows, -1)[:, owner].flatten(0, 1)
        assert_scattered(out, expected_left, whole_right[0])
        assert owners.counters[owner].tolist() == [signals(owner)] * 4
        assert bool(owners.memory[owner, :, -1].isnan().all()), "a tile was stored outside of its piece"


def signals_of_owner_of(pieces: Pieces, tiling: Tiling, columns: int) -> Callable[[int], int]:
    """How many signals an owner gets of each rank."""
    tiles = list(row_tiles(1, pieces.blocks * pieces.rows, tiling.m))
    return lambda owner: signals_of_owner(tiles, pieces, owner) * -(-columns // tiling.n)


def assert_scattered(found: Tensor, left: Tensor, right: Tensor) -> None:
    """As `assert_product`, but that each of 4 ranks' products was rounded, and may be larger than their sum."""
    exact, magnitude = left @ right, left.abs() @ right.abs()
    bound = 3 * torch.finfo(found.dtype).eps * magnitude + left.shape[-1] * 2.0**-23 * magnitude
    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("tiling", [SMALL, BY_DESCRIPTORS])
def test_transposed_factors_and_pieces_are_scattered_alike(tiling: Tiling) -> None:
    left, right = factor(1, 24, 40).mT, factor(1, 16, 24, seed=1).mT
    pieces = Pieces(1, 4, 10)
    owners = Owners(pieces, 10, 16, torch.float32)
    scattered_call(left, right, None, owners.destinations(2, (1, 10)), tiling).run(2)
    found = torch.stack([owners.memory[owner, 2].flatten()[:160].view(16, 10).T for owner in range(4)])
    assert_product(found.view(40, 16), left[0], right[0])


@pytest.mark.parametrize(("form", "shape"), [("rows", (12, 8)), ("rows", (3, 8, 8)), ("columns", (12, 8)),
    ("columns", (3, 8, 8)), ("matrices", (4, 5, 8))])  # fmt: skip
@pytest.mark.parametrize("outer", [1, 2])
def test_gathered_values_are_multiplied_as_the_op_defines(form: str, shape: tuple[int, ...], outer: int) -> None:
    shards = [factor(*shape, seed=rank) for rank in range(4)]
    gathered = joined(torch.stack(shards), 0 if form == "matrices" else -2, outer)
    gather = Gather.of(shards[2], form, outer, 4)
    assert gather.shape == gathered.shape
    segments = Segments(gather.pieces, 3)
    for rank, shard in enumerate(shards):
        rows, flat = gathered.flatten(0, -2), shard.flatten(0, -2)
        for segment in segments.of_rank(rank):
            here, there = segments.row_range(segment), segments.row_range_of_piece(segment)
            assert rows[here.start : here.stop].equal(flat[there.start : there.stop])
    other = factor(*shape[:-2], 7, 8, seed=5) if form == "columns" else factor(*gathered.shape[:-2], 8, 7, seed=5)
    left, right = (other, gathered.mT) if form == "columns" else (gathered, other)
    for bias in (None, factor(right.shape[-1], seed=6), factor(left.shape[-2], 1, seed=7)):
        found = multiply(gathered, other, bias, form, there_at(segments, 2), Fused(SMALL, 3))
        assert_product(found, left, right, bias)


@pytest.mark.parametrize(("form", "left", "right"), [("rows", (24, 8), (8, 7)), ("rows", (3, 24, 8), (3, 8, 7)),
    ("columns", (5, 8), (8, 24)), ("matrices", (8, 5, 8), (8, 8, 7))])  # fmt: skip
@pytest.mark.parametrize("outer", [1, 2])
def test_products_are_scattered_as_the_op_defines(
    form: str, left: tuple[int, ...], right: tuple[int, ...], outer: int
) -> None:
    factors = factor(*left), factor(*right, seed=1), factor(right[-1], seed=2)
    dim = {"rows": len(left) - 2, "columns": len(left) - 1, "matrices": 0}[form]
    product = Product.of(*factors, form, outer, 4)
    size = torch.Size(product.piece_shape).numel()
    owners = Owners(product.pieces, -(-size // 16), 16, torch.float32)
    scattered_call(product.left, product.right, product.bias, owners.destinations(1, product.strides), SMALL).run(2)
    pieces = [owners.memory[owner, 1].flatten()[:size].view(product.piece_shape) for owner in range(4)]
    assert_product(joined(torch.stack(pieces), dim, outer), *factors)


def test_a_sum_for_all_has_pieces_of_any_number_of_rows() -> None:
    factors = factor(2, 7, 8), factor(2, 8, 16, seed=1), factor(16, seed=2)
    product = Product.of_all(*factors, 4)
    owners = Owners(product.pieces, 4, 16, torch.float32)
    scattered_call(product.left, product.right, product.bias, owners.destinations(3, product.strides), SMALL).run(2)
    rows = owners.memory[:, 3, :4].flatten(0, 1)
    assert_product(rows[:14].view(2, 7, 16), *factors)
    assert bool(rows[14:].isnan().all())


def joined(pieces: Tensor, dim: int, outer: int) -> Tensor:
    """The pieces of all ranks, (parts, *piece), at the digits (outer, parts, rows) of a dim of a piece."""
    dim %= pieces.dim() - 1
    return pieces.unflatten(dim + 1, (outer, -1)).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def test_sums_wait_for_every_rank(on_second_look: OnLook) -> None:
    pieces = torch.full((3, 5), torch.nan)
    counters = torch.tensor([4, 4, 4], dtype=torch.int32)
    out = torch.zeros(5)

    def send(source: int) -> None:
        pieces[source] = 10.0**source
        counters[source] += 2

    sent = on_second_look(counters, range(3), send)
    sum_call(pieces, out, counters, 6).run(1)
    assert out.tolist() == [111.0] * 5
    assert sent == [0, 1, 2]


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    pieces = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    out = torch.zeros(1)
    sum_call(pieces, out, torch.zeros(4, dtype=torch.int32), 0).run(1)
    assert out.item() == ((pieces[0] + pieces[1]) + pieces[2] + pieces[3]).item()


dims = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 2**40)), max_size=4).map(tuple)


@settings(max_examples=30)
@given(dims, st.integers(0, 2**41), st.integers(0, 2**31), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
def test_random_numbers_are_those_of_the_cpu(
    dims: tuple[tuple[int, int], ...], offset: int, microbatch: int, seed: int, step: int
) -> None:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    stream, span = torch.tensor([[seed, step, microbatch, 1 << 25 | 77]]), 2**30
    out = torch.full(sizes, torch.nan)
    uniform_call(out, stream, LogicalBox(tuple(sizes), tuple(strides), offset), span).run(uniform_programs(out))
    assert out.equal(torch.ops.fxpar.uniform(stream, sizes, sizes, strides, offset, span))


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025])
def test_random_numbers_come_in_any_number(count: int) -> None:
    stream, out = torch.tensor([[5, 6, 7, 8]]), torch.full((count + 1,), torch.nan)
    uniform_call(out[:count], stream, LogicalBox((count,), (1,), 3), count).run(uniform_programs(out[:count]))
    assert out[:count].equal(torch.ops.fxpar.uniform(stream, [count], [count], [1], 3, count))
    assert bool(out[count:].isnan().all()), "nothing is written beyond the end"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_bands_walk_over_every_tile_once(rows: int, columns: int, band: int) -> None:
    walk = [place_of_tile.fn(tile, rows, columns, band) for tile in range(rows * columns)]
    assert sorted(walk) == sorted(product(range(rows), range(columns)))
