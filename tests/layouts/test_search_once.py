"""Ranks that would search the same layouts let one of them search."""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import fx, nn

from fxpar.costs.dataflow import operations
from fxpar.costs.edge_prices import EdgePrices
from fxpar.ir.hints import Spec
from fxpar.layouts.pins import Pin
from fxpar.layouts.search import Search
from fxpar.layouts.search_once import search_once
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import init_mesh
from tests.layouts.laid_out import decomposed, prices


class Asked(NamedTuple):
    """Whether a rank got what its own search finds, and how often it had searched for that."""

    is_same: bool
    searches: int


def ask(hints_of_ranks: list[Spec]) -> Asked:
    """Search the layouts of two layers, of which this rank hints the first one's weight so."""
    mesh = init_mesh(x=len(hints_of_ranks))
    joint = decomposed(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(8, 16))
    program, weighed = operations(joint), prices()
    weight = next(op.node for op in program if op.port is not None and op.port.name == "0.weight")
    pins: dict[fx.Node, Pin] = {weight: Pin.hinted(hints_of_ranks[mesh.rank])}
    edges = EdgePrices((), mesh, weighed.network)

    search = Search(program, pins, mesh, weighed, 1, edges)
    with patch.object(Search, "run", autospec=True, side_effect=Search.run) as run:
        found = search_once(search)
        assert search_once(search) == found
    return Asked(found == search.run(), run.call_count)


def test_one_searches_for_all() -> None:
    answers = run_ranks(3, ask, [("x", None)] * 3)
    assert all(answer.is_same for answer in answers)
    assert sorted(answer.searches for answer in answers) == [0, 0, 1]


def test_who_has_other_pins_searches_for_itself() -> None:
    answers = run_ranks(2, ask, [("x", None), (None, "x")])
    assert [*answers] == [Asked(is_same=True, searches=1)] * 2
