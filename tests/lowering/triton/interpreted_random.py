"""Random numbers, in Triton's interpreter: run by test_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpar.ir.random  # noqa: F401  registers the op that runs on CPUs
from fxpar.ir.tiles import LogicalBox
from fxpar.lowering.triton.launch import uniform_call, uniform_programs

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


@pytest.mark.parametrize(
    ("sizes", "strides", "offset", "span"),
    [
        ((2048,), (1,), 2**40, 4096),
        ((3, 5, 12), (2**33, 64, 1), 16, 2**36),
        ((7, 4), (4, 1), 0, 28),
        ((5, 8), (8, 1), 4, 44),
    ],
)
def test_whole_blocks_are_drawn_at_once(
    sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, span: int
) -> None:
    stream, out = torch.tensor([[2**62 + 7, 6, 3, 8]]), torch.full(sizes, torch.nan)
    call = uniform_call(out, stream, LogicalBox(sizes, strides, offset), span)
    assert call.constants["DRAWN"] == 4
    call.run(uniform_programs(out))
    assert out.equal(torch.ops.fxpar.uniform(stream, list(sizes), list(sizes), list(strides), offset, span))


@pytest.mark.parametrize(
    ("strides", "offset", "span"), [((8, 1), 2, 40), ((8, 1), 0, 42), ((10, 1), 0, 40), ((1, 8), 0, 40)]
)
def test_other_boxes_are_drawn_by_elements(strides: tuple[int, int], offset: int, span: int) -> None:
    stream, out = torch.tensor([[5, 6, 7, 8]]), torch.full((5, 8), torch.nan)
    call = uniform_call(out, stream, LogicalBox((5, 8), strides, offset), span)
    assert call.constants["DRAWN"] == 1
    call.run(uniform_programs(out))
    assert out.equal(torch.ops.fxpar.uniform(stream, [5, 8], [5, 8], list(strides), offset, span))


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025])
def test_random_numbers_come_in_any_number(count: int) -> None:
    stream, out = torch.tensor([[5, 6, 7, 8]]), torch.full((count + 1,), torch.nan)
    uniform_call(out[:count], stream, LogicalBox((count,), (1,), 3), count).run(uniform_programs(out[:count]))
    assert out[:count].equal(torch.ops.fxpar.uniform(stream, [count], [count], [1], 3, count))
    assert bool(out[count:].isnan().all()), "nothing is written beyond the end"
