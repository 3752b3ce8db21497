"""What each rank does with its simulated GPU: fused ops of all forms, one after another, with no wait between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ir.fused_ops import pieces_of_product, product, products_of_pieces
from fxpar.lowering.triton.gather import Gather, gather_and_multiply
from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.scatter import Product, multiply_and_reduce, multiply_and_scatter
from fxpar.lowering.triton.tiling import Tiling
from fxpar.lowering.triton.workspace import Workspace
from tests.lowering.triton.simulated_gpu import SymmetricMemory, simulated_gpu

TILING = Tiling(16, 16, 16, warps=4, stages=2, band=1)

Outcome: TypeAlias = tuple[list[Tensor], list[Tensor]]
"""What a fused op returned, which is right when the GPU has done all, and what it is by definition."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Factors, the same on all ranks."""

    generator: torch.Generator

    @classmethod
    def seeded(cls, seed: int) -> Draw:
        """Factors that follow from `seed`."""
        return cls(torch.Generator().manual_seed(seed))

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def of_ranks(self, *shape: int) -> list[Tensor]:
        """A factor of each rank."""
        return [self(*shape) for _ in range(dist.get_world_size())]


@dataclass(frozen=True, slots=True)
class GatherCase:
    """An all-gather of shards of `shape`, and products with one other factor for each of `columns`.

    segment_rows: 0 is a whole block of rows at a time.
    """

    form: str
    shape: tuple[int, ...]
    columns: Sequence[int]
    outer: int = 1
    segment_rows: int = 0
    pushes: bool = False

    def __call__(self, draw: Draw, workspace: Workspace) -> Outcome:
        parts, terms = dist.get_world_size(), self.shape[-1]
        shards = draw.of_ranks(*self.shape)
        batch = [self.shape[0] * (parts if self.form == "matrices" else 1)] if len(self.shape) == 3 else []
        others = [
            draw(*batch, size, terms) if self.form == "columns" else draw(*batch, terms, size) for size in self.columns
        ]
        bias = draw(self.columns[0], 1) if self.form == "columns" else draw(self.columns[0])
        biases = [bias, *(None for _ in others[1:])]
        gather = Gather.of(shards[dist.get_rank()], self.form, self.outer, parts)
        how = Fused(TILING, self.segment_rows or gather.pieces.rows, self.pushes)
        found, gathered = gather_and_multiply(gather, others, biases, self.form, how, workspace)
        expected = products_of_pieces(torch.stack(shards), others, biases, self.form, self.outer, keeps_gathered=True)
        return [*found, gathered.clone()], expected


@dataclass(frozen=True, slots=True)
class ScatterCase:
    """Products of two factors on each rank, left of shape `left` and right of shape `right`, summed and scattered."""

    form: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    outer: int = 1

    def __call__(self, draw: Draw, workspace: Workspace) -> Outcome:
        rank, parts = dist.get_rank(), dist.get_world_size()
        lefts, rights, biases = (draw.of_ranks(*shape) for shape in (self.left, self.right, self.right[-1:]))
        ours = Product.of(lefts[rank], rights[rank], biases[rank], self.form, self.outer, parts)
        found = multiply_and_scatter(ours, Fused(TILING), workspace)
        pieces = [
            pieces_of_product(*factors, self.form, self.outer, parts)[rank]
            for factors in zip(lefts, rights, biases, strict=True)
        ]
        return [found.clone()], [torch.stack(pieces).sum(0)]


@dataclass(frozen=True, slots=True)
class ReduceCase:
    """Products of two factors on each rank, left of shape `left` and right of shape `right`, summed for all."""

    left: tuple[int, ...]
    right: tuple[int, ...]

    def __call__(self, draw: Draw, workspace: Workspace) -> Outcome:
        rank, parts = dist.get_rank(), dist.get_world_size()
        lefts, rights = draw.of_ranks(*self.left), draw.of_ranks(*self.right)
        ours = Product.of_all(lefts[rank], rights[rank], None, parts)
        found = multiply_and_reduce(ours, Fused(TILING), workspace)
        terms = [product(left, right, None) for left, right in zip(lefts, rights, strict=True)]
        return [found.clone()], [torch.stack(terms).sum(0).flatten(0, -2)]


Case: TypeAlias = GatherCase | ScatterCase | ReduceCase


def cases(parts: int) -> list[Case]:
    """Of all forms: tiles that are whole or cut short, several or fewer than one for each rank, batches, and digits."""
    return [
        GatherCase("rows", (16, 16), [16], pushes=True),
        ScatterCase("rows", (16 * parts, 16), (16, 16)),
        GatherCase("rows", (16, 16), [16]),  # the other direction, the same shapes
        ScatterCase("rows", (16 * parts, 16), (16, 16)),
        ReduceCase((5, 7), (7, 33)),
        GatherCase("columns", (20, 16), [24], segment_rows=7),
        ScatterCase("columns", (20, 8), (8, 12 * parts)),
        GatherCase("matrices", (2, 10, 8), [9], outer=2, segment_rows=4, pushes=True),
        ScatterCase("matrices", (2 * parts, 10, 8), (2 * parts, 8, 9), outer=2),
        ReduceCase((2, 11, 8), (2, 8, 9)),
        GatherCase("rows", (2, 6, 9), [20, 5], outer=2, segment_rows=1),
        ScatterCase("rows", (2, 6 * parts, 9), (2, 9, 20), outer=2),
        GatherCase("columns", (2, 6, 9), [5], outer=3, pushes=True),
        ScatterCase("columns", (5, 9), (9, 6 * parts), outer=3),
        GatherCase("matrices", (1, 20, 8), [20], segment_rows=16),
        ScatterCase("matrices", (parts, 5, 8), (parts, 8, 9)),
    ]


def run_fused_ops(
    folder: Path,
    seed: int,
    chosen: Sequence[Case],
    mutation: Callable[[], AbstractContextManager[None]] = nullcontext,
    patience_s: float = 60.0,
) -> list[str]:
    """What went wrong on this rank."""
    problems = []
    with simulated_gpu(folder, seed + dist.get_rank(), patience_s) as gpu, mutation():
        try:
            workspace = Workspace(_world(), torch.device("cpu"))
            outcomes = [case(Draw.seeded(100 * seed + call), workspace) for call, case in enumerate(chosen)]
            gpu.synchronize()
        except Exception as error:
            return [repr(error)]
    for call, (case, (found, expected)) in enumerate(zip(chosen, outcomes, strict=True)):
        for result, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not torch.allclose(one, other, atol=1e-4):
                problems.append(f"call {call}, {case}, result {result}: off by {(one - other).abs().max()}")
    return problems


def buffers_asked_for(folder: Path, chosen: Sequence[Case], rounds: int) -> list[int]:
    """How often symmetric memory is asked for a buffer in each round of calls."""
    counts, get_buffer = [0], SymmetricMemory.get_buffer

    def count(*arguments: Any) -> Tensor:
        counts[-1] += 1
        return get_buffer(*arguments)

    with simulated_gpu(folder, 0, 60.0) as gpu, patch.object(SymmetricMemory, "get_buffer", count):
        workspace = Workspace(_world(), torch.device("cpu"))
        for turn in range(rounds):
            for case in chosen:
                case(Draw.seeded(turn), workspace)
            counts.append(0)
        gpu.synchronize()
    return counts[:-1]


def _world() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name
