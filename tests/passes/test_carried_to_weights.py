"""What crosses from the forward and the first half to the second: as little as the gradients of weights need."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fxpar.graph.extract import returned
from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import PortKind
from tests.passes.backward_halves import Chain, check_bits, count, linears, work
from tests.support.halves import joints_of, split

aten = torch.ops.aten


def entering(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def test_the_first_stage_only_hands_its_tangents_through() -> None:
    first, _ = joints_of(linears(), (torch.randn(5, 6),), ["2"])
    halves = check_bits(first)
    assert not work(halves.inputs)
    assert (halves.inputs_saved, halves.num_carried) == ((), 1)
    assert entering(halves.inputs) == entering(halves.weights)[len(halves.weights_saved) :]


def test_a_stage_whose_parameters_need_no_gradient_has_nothing_to_do_later() -> None:
    model = linears()
    model[2:].requires_grad_(False)
    _, second = joints_of(model, (torch.randn(5, 6),), ["2"])
    halves = check_bits(second)
    assert {port.kind for port in second.gradients} == {PortKind.EDGE}
    assert (halves.weights_saved, halves.num_carried) == ((), 0)
    assert [node.op for node in halves.weights.graph.nodes] == ["output"]


def test_a_gradient_that_is_a_tangent_is_handed_through() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    model = Chain(nn.Linear(6, 6), Add(), nn.Linear(6, 6))
    _, middle, _ = joints_of(model, (torch.randn(5, 6),), ["1", "2"])
    halves = check_bits(middle)
    assert not work(halves.inputs)
    assert not work(halves.weights)
    assert halves.num_carried == 1
    assert entering(halves.inputs) == entering(halves.weights)


def test_an_op_with_several_results_runs_in_the_first_half_and_its_gradients_of_weights_are_carried() -> None:
    _, second = joints_of(Chain(nn.Linear(6, 6), nn.LayerNorm(6)), (torch.randn(5, 6),), ["1"])
    halves = check_bits(second)
    assert count(halves.inputs, aten.native_layer_norm_backward.default) == 1
    assert {node.op for node in halves.weights.graph.nodes} == {"placeholder", "output"}
    assert halves.num_carried == 2


def test_what_only_the_first_half_needs_is_freed_with_it() -> None:
    _, second = joints_of(Chain(nn.Linear(6, 6), nn.Sigmoid(), nn.Tanh()), (torch.randn(5, 6),), ["1"])
    _, halves = split(second)
    assert halves.inputs_saved
    assert halves.weights_saved == ()


def test_the_part_that_weights_need_is_carried_as_a_copy() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:2] * self.weight, x[2:]])

    model = Chain(nn.Linear(4, 4), Rows(), nn.Tanh(), nn.Linear(4, 4))
    _, middle, _ = joints_of(model, (torch.randn(20, 4),), ["1", "3"])
    _, halves = split(middle)
    carried = returned(halves.inputs)[1:]
    assert [tuple(tensor(node).shape) for node in carried] == [(2, 4)]
    values = [torch.randn(tensor(node).shape) for node in halves.inputs.graph.find_nodes(op="placeholder")]
    (rows,) = halves.inputs(*values)[1:]
    assert rows.untyped_storage().nbytes() == rows.nbytes, "the carried rows hold on to the whole gradient"
