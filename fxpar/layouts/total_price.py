"""The cost of a stage whose layouts are chosen along all axes, by which solutions are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fxpar.costs.dataflow import Operation, Value, roots
from fxpar.costs.op_cost import work_us
from fxpar.costs.prices import Prices
from fxpar.graph.redistribute import local_size, plan_redistribution, traffic
from fxpar.ir import node_meta
from fxpar.ir.layout import Layout
from fxpar.layouts.border_prices import BorderPrices
from fxpar.layouts.solved_axes import SolvedAxes


def total_us(
    program: Sequence[Operation],
    solved: SolvedAxes,
    shared_by: Sequence[int],
    prices: Prices,
    sizes: Mapping[str, int],
    border: BorderPrices,
) -> float:
    """The microseconds of work, redistributions, transfers and memory of one rank.

    `shared_by[i]` ranks share the work of operation i; `sizes` are those of the mesh's axes. Values are redistributed
    as `insert_collectives` does it: with the least traffic from any layout in which they exist already.
    """
    work = sum(work_us(operation, prices) / ranks for operation, ranks in zip(program, shared_by, strict=True))
    ports = sum(border.us(operation, value, layout) for operation, value, layout in _at_ports(program, solved))
    return work + ports + _moves_us(program, solved, prices, sizes) + _saved_us(program, solved, prices)


def _at_ports(program: Sequence[Operation], solved: SolvedAxes) -> Iterator[tuple[Operation, Value, Layout]]:
    for number, operation in enumerate(program):
        if operation.port is not None:
            (value,) = operation.values
            yield operation, value, solved.operand(number, 0, value) if operation.operands else solved.result(value)


def _moves_us(program: Sequence[Operation], solved: SolvedAxes, prices: Prices, sizes: Mapping[str, int]) -> float:
    us = 0.0
    held: dict[Value, dict[Layout, None]] = {}
    for number, operation in enumerate(program):
        for position, value in enumerate(operation.operands):
            there = held.setdefault(value, {solved.result(value): None})
            need = solved.operand(number, position, value)
            if need in there:
                continue
            width = value.tensor.element_size()
            for step in min(
                (plan_redistribution(have, need) for have in there), key=lambda steps: traffic(steps, sizes)
            ):
                sent = step.traffic(sizes[step.axis]) * width
                us += prices.move_us(step.kind, step.axis, sent, local_size(step.after) * width)
                there[step.after] = None
    return us


def _saved_us(program: Sequence[Operation], solved: SolvedAxes, prices: Prices) -> float:
    """The price of the activations that the backward reads: once per storage and size of the local shard."""
    root = roots(program)
    saved: dict[tuple[Value, int], None] = {}
    for number, operation in enumerate(program):
        if operation.call is None or not node_meta.is_backward(operation.node):
            continue
        for position, value in enumerate(operation.operands):
            if root[value].node.op != "placeholder" and not node_meta.is_backward(value.node):
                layout = solved.operand(number, position, value)
                saved[root[value], local_size(layout) * value.tensor.element_size()] = None
    return prices.saved_us_per_byte * sum(num_bytes for _, num_bytes in saved)
