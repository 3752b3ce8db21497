"""Memory of transfers is used again as soon as nobody holds it, and never before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.transport.buffers import Buffers, Piece

CPU = torch.device("cpu")


def test_a_buffer_is_free_when_no_view_of_it_is_left() -> None:
    buffers = Buffers(CPU)
    first = buffers.take(24)
    place, view = first.data_ptr(), Piece((2, 3), (3, 1), torch.float32, CPU).over(first)
    del first
    second = buffers.take(24)
    assert second.data_ptr() != place, "a view still holds it"
    del view
    assert buffers.take(24).data_ptr() == place
    assert buffers.num_bytes == 48


def test_buffers_of_other_sizes_are_kept_apart() -> None:
    buffers = Buffers(CPU)
    for _ in range(3):
        sizes = [0, 8, 16, 8]
        taken = [buffers.take(size) for size in sizes]
        assert [len(memory) for memory in taken] == sizes
        assert buffers.num_bytes == 32
        del taken


def test_threads_never_share_a_buffer() -> None:
    buffers = Buffers(CPU)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            taken = list(threads.map(lambda _: buffers.take(8), range(16)))
            assert len({memory.data_ptr() for memory in taken}) == 16
            del taken
    assert buffers.num_bytes == 16 * 8


@given(st.lists(st.integers(0, 4), max_size=3), st.permutations(range(3)), st.sampled_from([torch.bool, torch.double]))
def test_a_piece_lies_in_its_memory_as_the_tensor_it_is_like(
    shape: list[int], order: list[int], dtype: torch.dtype
) -> None:
    like = torch.zeros(shape, dtype=dtype).permute([dim for dim in order if dim < len(shape)])
    piece = Piece.like(like)
    found = piece.over(torch.ones(piece.num_bytes, dtype=torch.uint8))
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
    assert piece.num_bytes == like.nbytes


@pytest.mark.parametrize("stride", [(8, 1), (1, 4)])
def test_a_piece_with_gaps_takes_them_along(stride: tuple[int, int]) -> None:
    piece = Piece((3, 2), stride, torch.float32, CPU)
    memory = torch.zeros(piece.num_bytes, dtype=torch.uint8)
    piece.over(memory).fill_(1)
    assert memory.view(torch.float32)[-1] == 1 and memory.view(torch.float32).sum() == 6
