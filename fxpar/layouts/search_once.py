"""Search layouts once for all ranks and all stages that would find the same: for a deep model it takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeAlias

from fxpar.costs.dataflow import Value
from fxpar.ir import node_meta
from fxpar.ir.stage import Port, PortKind
from fxpar.layouts.search import Chosen, Search
from fxpar.world.compute_once import compute_once

Searched: TypeAlias = MutableMapping[str, Chosen]
"""Layouts by the questions that asked for them."""


def search_once(search: Search, known: Searched | None = None) -> Chosen:
    """The result of `search.run()`, which only one of the ranks with the same search calls.

    Args:
        known: results of searches before, such as those of other stages; this one is added.
    """
    if not search.sizes:
        return search.run()
    found, question = {} if known is None else known, _question(search)
    if question not in found:
        found[question] = compute_once(question, search.run)
    return found[question]


def _question(search: Search) -> str:
    """All that the search depends on, as text without names: equal stages ask the same."""
    is_on_one_host = len(set(search.mesh.hosts)) == 1
    given = (search.mesh.sizes, is_on_one_host, search.prices, search.microbatches)
    return "\n".join(["layouts", *map(str, given), *_described(search)])


def _described(search: Search) -> Iterator[str]:
    """A line for each operation; what it shares with earlier ones is told by their numbers."""
    numbers: dict[Value, tuple[int, int]] = {}
    ports: dict[Port, int] = {}
    for number, operation in enumerate(search.program):
        operands = [numbers[value] for value in operation.operands]
        side, pin = node_meta.is_backward(operation.node), search.pins.get(operation.node)
        line = f"{operation.signature} {operands} {side} {operation.border} {pin}"
        if (port := operation.port) is not None:
            line += f" {port.kind} {ports.setdefault(port, number)}"
            line += f" {search.edges.given(port)}" if port.kind is PortKind.EDGE else ""
        yield line
        for position, value in enumerate(operation.results):
            if value is not None:
                numbers[value] = number, position
