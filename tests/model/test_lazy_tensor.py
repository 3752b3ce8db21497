"""Parts of lazy tensors are those of the tensors that they stand for, and are made of no more than is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxpar.model.pretrained.lazy_tensor import Box, LazyTensor

FIRST, SECOND = torch.arange(48.0).view(4, 6, 2), -torch.arange(48.0).view(4, 6, 2)


def lazy(tensor: Tensor, name: str, reads: list[Box]) -> LazyTensor:
    def copy_part(box: Box, target: Tensor) -> None:
        reads.append(box)
        target.copy_(tensor[box])

    return LazyTensor(tensor, copy_part, frozenset([name]))


def num_read(reads: list[Box]) -> int:
    """How many elements were read."""
    return sum(int(torch.tensor([part.stop - part.start for part in box]).prod()) for box in reads)


BY_PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b], dim=-2),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "transpose": lambda a, b: a.transpose(0, -1).contiguous(),
    "chunk": lambda a, b: torch.chunk(b, 4, dim=1)[1],
    "split with sizes": lambda a, b: torch.split(b, [1, 4, 1], dim=-2)[1],
    "chunk and squeeze": lambda a, b: torch.chunk(a, 4, dim=0)[2].squeeze(0),
    "squeeze of a dim that has several": lambda a, b: a.squeeze(0),
    "chunks of a stack": lambda a, b: torch.chunk(torch.stack([a, b]), 2, dim=2)[1].detach().clone(),
}
OF_WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "interleave": lambda a, b: a.reshape(4, 2, 3, 2).transpose(1, 2).reshape(4, 6, 2).contiguous(),
    "several results": lambda a, b: b.unbind(1)[3],
    "arithmetic": lambda a, b: a + 2 * b,
}


@pytest.mark.parametrize("name", [*BY_PARTS, *OF_WHOLE])
def test_every_part_is_that_of_the_tensor(name: str) -> None:
    op = {**BY_PARTS, **OF_WHOLE}[name]
    reads: list[Box] = []
    found, expected = op(lazy(FIRST, "first", reads), lazy(SECOND, "second", reads)), op(FIRST, SECOND)
    assert isinstance(found, LazyTensor)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert not reads, "nothing is read before it is used"
    for box in itertools.product(*([slice(0, 1), slice(size // 2, size), slice(0, size)] for size in found.shape)):
        reads.clear()
        part = torch.empty(expected[box].shape)
        found.copy_part(box, part)
        assert torch.equal(part, expected[box]), box
        if name in BY_PARTS:
            assert num_read(reads) == expected[box].numel(), "no element is read that is not asked for"
    assert torch.equal(found.whole(), expected)


def test_a_lazy_tensor_knows_what_it_is_made_of() -> None:
    a, b = lazy(FIRST, "first", []), lazy(SECOND, "second", [])
    assert torch.cat([a, b.transpose(0, 1).reshape(4, 6, 2)]).sources == {"first", "second"}
    assert torch.chunk(a, 2)[1].sources == {"first"}
