"""The native core: its random numbers are Philox4x32-10, and belong to logical indices alone."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.core.philox import philox_block, philox_uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_a_philox_block_equals_the_vectors_published_with_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox_block(counter, key) == expected


def uniform_at(index: int, seed: int, step: int, op: int) -> float:
    """What the numbers are by definition, one at a time."""
    block = index // 4
    words = philox_block((block & ONES, block >> 32, op, step), (seed & ONES, seed >> 32))
    return (words[index % 4] >> 8) / 2**24


@pytest.mark.parametrize("offset", [0, 1, 7, 2**34 - 5, 2**63 - 2000])
@pytest.mark.parametrize("stride", [1, 3, 4])
def test_each_number_is_the_upper_24_bits_of_its_logical_index_s_word(offset: int, stride: int) -> None:
    seed, step, op = 0x0123456789ABCDEF, 5, 9
    drawn = philox_uniform((301,), (stride,), offset, seed=seed, step=step, op=op)
    expected = [uniform_at(offset + i * stride, seed, step, op) for i in range(301)]
    assert drawn.dtype == torch.float32
    assert drawn.tolist() == expected


@st.composite
def shapes_and_shards(draw: st.DrawFn) -> tuple[list[int], list[slice], list[int]]:
    """A logical shape, a strided box of it, and an order of its dims."""
    shape = draw(st.lists(st.integers(1, 40), min_size=0, max_size=4).filter(lambda s: torch.Size(s).numel() < 20_000))
    slices = []
    for size in shape:
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        slices.append(slice(start, stop, draw(st.integers(1, 3))))
    return shape, slices, draw(st.permutations(range(len(shape))))


@given(shapes_and_shards())
def test_a_shard_draws_the_numbers_that_the_whole_tensor_draws(
    case: tuple[list[int], list[slice], list[int]],
) -> None:
    shape, slices, order = case
    logical_index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    whole = philox_uniform(shape, logical_index.stride(), 0, seed=1, step=2, op=3)
    shard_index = logical_index[tuple(slices)].permute(order)
    shard = philox_uniform(shard_index.shape, shard_index.stride(), shard_index.storage_offset(), seed=1, step=2, op=3)
    assert torch.equal(shard, whole[tuple(slices)].permute(order))


def test_a_stride_may_be_zero_or_negative() -> None:
    row = philox_uniform((5,), (1,), 0, seed=1, step=0, op=0)
    assert torch.equal(philox_uniform((5,), (-1,), 4, seed=1, step=0, op=0), row.flip(0))
    assert torch.equal(philox_uniform((3, 5), (0, 1), 0, seed=1, step=0, op=0), row.expand(3, 5))


def test_numbers_are_uniform_and_differ_between_seeds_steps_and_ops() -> None:
    count = 1 << 16
    streams = [
        philox_uniform((count,), (1,), 0, seed=seed, step=step, op=op)
        for seed, step, op in product((0, 1 << 32), (0, 1), (0, 1))
    ]
    for stream in streams:
        assert stream.min() >= 0
        assert stream.max() < 1
        counts = torch.histc(stream, bins=16, min=0, max=1)
        assert (counts - count / 16).abs().max() < 5 * (count / 16) ** 0.5, counts
    for one, other in pairwise(streams):
        correlation = torch.corrcoef(torch.stack((one, other)))[0, 1]
        assert correlation.abs() < 5 / count**0.5, correlation


def test_an_empty_box_draws_nothing() -> None:
    assert philox_uniform((1 << 40, 0), (1, 1), 0, seed=0, step=0, op=0).shape == (1 << 40, 0)


@pytest.mark.parametrize(("stride", "offset"), [(-1, 3), (1, 2**63 - 4), (2**62, 0), (-(2**62), 2**62)])
def test_a_logical_index_out_of_range_is_refused(stride: int, offset: int) -> None:
    with pytest.raises(AssertionError, match="logical indices"):
        philox_uniform((5,), (stride,), offset, seed=0, step=0, op=0)
