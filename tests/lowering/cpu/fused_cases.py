"""Calls of fused ops whose arguments every rank can make for every other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxpar.ir.fused_ops import GATHER_FORMS, SCATTER_FORMS

INNER, WIDTH = 24, 20


@dataclass(frozen=True, slots=True)
class Case:
    """A call of a fused op.

    op: "gather", "scatter" or "reduce"; form: of the first two.
    rows: of each piece, but for "reduce", where they are all rows.
    batch: of matrices, or None for a single one.
    """

    op: str
    form: str
    outer: int = 1
    rows: int = 6
    batch: int | None = None
    dtype: torch.dtype = torch.float32
    is_transposed: bool = False
    has_bias: bool = False
    num_others: int = 1
    keeps_gathered: bool = False


def all_cases() -> Iterator[Case]:
    """Every op in every form, with each property that its arguments may have."""
    plain = [Case("gather", form) for form in GATHER_FORMS]
    plain += [Case("scatter", form) for form in SCATTER_FORMS]
    plain += [Case("reduce", "rows", rows=rows) for rows in (1, 2, 13)]
    for case in plain:
        yield case
        yield replace(case, is_transposed=True, has_bias=True)
        yield replace(case, outer=3, has_bias=True, num_others=3, keeps_gathered=True)
        yield replace(case, outer=2, rows=40, is_transposed=True)
        yield replace(case, rows=0, has_bias=True)
        yield replace(case, rows=300, outer=1)
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            yield replace(case, dtype=dtype, has_bias=True, outer=2)
        if case.form != "matrices":
            yield replace(case, batch=2, has_bias=True, keeps_gathered=True)
            yield replace(case, batch=2, outer=2, is_transposed=True)


class Maker:
    """Makes the arguments of a rank's call."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self._generator = torch.Generator().manual_seed(rank)
        self._batch = () if case.batch is None else (case.batch,)

    def matrices(self, *shape: int) -> Tensor:
        """Random; transposed, it is not their last dim that is dense."""
        shape = (*self._batch, *shape)
        if self.case.is_transposed:
            return self._random(*shape[:-2], shape[-1], shape[-2]).mT
        return self._random(*shape)

    def bias(self, number: int, last: int) -> Tensor | None:
        """Of the last dim alone, of all dims, or none."""
        if not self.case.has_bias:
            return None
        return (self._random(last), self._random(1, last), None)[number % 3]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.case.dtype)


def arguments(case: Case, rank: int, parts: int) -> list[Any]:
    """What `rank` calls the op with, but for the name of the group."""
    maker = Maker(case, rank)
    if case.op == "gather":
        return _gather_arguments(maker, parts)
    rows = case.rows if case.op == "reduce" else case.outer * case.rows * parts
    left_shape, right_shape = {
        "rows": ((rows, INNER), (INNER, WIDTH)),
        "columns": ((WIDTH, INNER), (INNER, rows)),
        "matrices": ((rows, 5, INNER), (rows, INNER, WIDTH)),
    }[case.form]
    left, right = maker.matrices(*left_shape), maker.matrices(*right_shape)
    factors = [left, right, maker.bias(0, right.shape[-1])]
    return [*factors, parts] if case.op == "reduce" else [*factors, case.form, case.outer, parts]


def _gather_arguments(maker: Maker, parts: int) -> list[Any]:
    case = maker.case
    piece, whole = case.outer * case.rows, case.outer * case.rows * parts
    shard = maker.matrices(piece, 5, INNER) if case.form == "matrices" else maker.matrices(piece, INNER)
    shape, last = {
        "rows": ((INNER, WIDTH), WIDTH),
        "columns": ((WIDTH, INNER), whole),
        "sum_right": ((WIDTH, whole), INNER),
        "sum_left": ((whole, WIDTH), WIDTH),
        "matrices": ((whole, INNER, WIDTH), WIDTH),
    }[case.form]
    others = [maker.matrices(*shape) for _ in range(case.num_others)]
    biases = [maker.bias(number, last) for number in range(case.num_others)]
    return [shard, others, biases, case.form, case.outer, parts, case.keeps_gathered]
