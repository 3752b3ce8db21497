"""Hints are taken at their word, also where they do not divide; those that cannot hold are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import InfeasibleLayoutError
from fxpar.ir import node_meta
from fxpar.ir.hints import Grouped
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import Port, PortKind
from fxpar.layouts.pins import Pin, Pins
from tests.layouts.laid_out import decomposed, lay_out, pins_of
from tests.passes.programs_to_lay_out import COLUMNS, ROWS, Gated, Residual, latency_counts
from tests.support.small_models import GPT


def test_a_hint_that_does_not_divide_is_ragged_through_the_graph() -> None:
    model = GPT(vocabulary=97, width=24, length=12, layers=1)
    tokens = torch.zeros(2, 12, dtype=torch.long)
    joint = decomposed(model, tokens, tokens)
    pins = pins_of(model, {"tokens.weight": COLUMNS, "head.weight": COLUMNS})
    laid = lay_out(joint, pins, latency_counts(), x=2)
    port = Port(PortKind.PARAMETER, "head.weight")
    assert laid.border.inputs[port] == laid.border.gradients[port] == Layout((97, 24), (("x", Shard(0, 2)),))
    (logits,) = (n for n in joint.module.graph.nodes if "mm" in n.name and node_meta.tensor(n).shape == (24, 97))
    assert node_meta.placed(logits).outputs == (Layout((24, 97), (("x", Shard(1, 2)),)),)


def test_a_grouped_hint_and_an_exact_pin_are_taken_at_their_word() -> None:
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32))
    grouped = pins_of(model, {"a1.weight": (Grouped(4, "x"), None)})
    exact = Pins({Port(PortKind.PARAMETER, "b1.weight"): Pin.exactly(Layout((32, 32), (("x", Shard(1, 2, 2)),)))})
    laid = lay_out(joint, Pins({**grouped.inputs, **exact.inputs}), latency_counts(), x=2)
    assert laid.parameter("a1.weight") == "[4*2@x*4, 32]"
    assert laid.parameter("b1.weight") == "[32, 2*2@x*8]"


def test_a_hint_on_a_weight_that_no_op_reads_is_taken_at_its_word() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            self.second(hidden)
            return hidden

    model = Half()
    joint = decomposed(model, torch.randn(4, 8))
    laid = lay_out(joint, pins_of(model, {"second.weight": ROWS}), latency_counts(), x=2)
    assert laid.parameter("second.weight") == "[8, 2@x*4]"


def test_hints_that_cannot_both_hold_are_named() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.left.sin() + self.right.cos())

    model = Sum()
    joint = decomposed(model, torch.randn(4, 8), with_backward=False)
    expected = r"(?s)over x \(2 ranks\).*parameter:(left|right): placed as S\(.\), but needed as S\(.\) by aten.add"
    with pytest.raises(InfeasibleLayoutError, match=expected):
        lay_out(joint, pins_of(model, {"left": COLUMNS, "right": ROWS}), latency_counts(), x=2)


def test_a_hint_that_no_op_can_take_is_named() -> None:
    model = Residual()
    joint = decomposed(model, torch.randn(16, 32))
    with pytest.raises(InfeasibleLayoutError, match=r"norm\.weight .*shard dim 0 over x \(64 ranks\)"):
        lay_out(joint, pins_of(model, {"norm.weight": ("x",)}), latency_counts(), x=64)
