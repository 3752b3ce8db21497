"""Add the costs of redistributing a value to the integer program: a move that several uses need is paid once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxpar.costs.dataflow import Value
from fxpar.graph.redistribute import RedistributeKind
from fxpar.ir.layout import Layout, Placement
from fxpar.layouts.integer_program import IntegerProgram
from fxpar.layouts.redistribution_prices import RedistributionPrices

_WHOLE = {
    RedistributeKind.REDUCE_SCATTER: RedistributeKind.ALL_REDUCE,
    RedistributeKind.ALL_TO_ALL: RedistributeKind.ALL_GATHER,
}
"""The move that replicates the value instead, after which the shard is a local slice."""


class _Move(NamedTuple):
    """A change of placement that several uses of a value can share."""

    kind: RedistributeKind
    us: float
    dst: Placement


_Moves = Mapping[_Move, Mapping[int, Sequence[int]]]
"""For each move, the matrix entries that need it, by the index of their use."""


def charge_redistribution(
    program: IntegerProgram,
    prices: RedistributionPrices,
    value: Value,
    layout: Layout,
    uses: Sequence[Mapping[tuple[Placement, Placement], int]],
    times: int,
) -> None:
    """Charge each move of `value` once, however many of its uses need it, multiplied by `times`, as many equal values.

    Args:
        layout: of the value along the axes that are solved already.
        uses: for each use, the variables that are 1 if the value is made in the first placement and needed in the
            second.
    """
    moves: dict[_Move, dict[int, list[int]]] = {}
    for number, entries in enumerate(uses):
        for (src, dst), entry in entries.items():
            if src != dst:
                kind, us = prices.move(value, layout, src, dst)
                moves.setdefault(_Move(kind, us * times, dst), {}).setdefault(number, []).append(entry)
    for move, members in moves.items():
        if move.kind is RedistributeKind.SLICE or len(uses) == 1:
            for entry in (entry for entries in members.values() for entry in entries):
                program.add_cost(entry, move.us)
    if len(uses) > 1:
        for whole in (RedistributeKind.ALL_REDUCE, RedistributeKind.ALL_GATHER):
            _share(program, moves, whole)


def _share(program: IntegerProgram, moves: _Moves, whole: RedistributeKind) -> None:
    """Charge moves of kind `whole`; each move to a shard is charged itself, or is a free slice of one of those."""
    slices: dict[int, list[int]] = {}
    for move, members in moves.items():
        if _WHOLE.get(move.kind) is whole:
            made = program.variable(move.us)
            for use, entries in members.items():
                sliced = program.variable()
                slices.setdefault(use, []).append(sliced)
                program.no_more_than([made, sliced], entries)
    made_whole: list[int] = []
    needed_whole: dict[int, Sequence[int]] = {}
    for move, members in moves.items():
        if move.kind is whole:
            made_whole.append(program.variable(move.us))
            needed_whole.update(members)
    for use in sorted({*needed_whole, *slices}):
        program.no_more_than(made_whole, [*needed_whole.get(use, ()), *slices.get(use, ())])
