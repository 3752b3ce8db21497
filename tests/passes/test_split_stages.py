"""split_stages: the stages one after another compute what the whole forward computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.costs.prices import prices_of
from fxpar.errors import InvalidStagesError, StageNotFoundError, UnsupportedGraphError
from fxpar.ir.stage import Port, PortKind
from fxpar.passes.split_stages import split_stages
from fxpar.passes.stages.balance_stages import balance_stages
from tests.support.captures import captured
from tests.support.frozen_chain import FrozenChain, class_batch
from tests.support.split_forward import check


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x)) * mask


class Net(nn.Module):
    """A skip connection over a stage, a tied weight, a mask made from inputs alone, and items of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))
        self.register_buffer("scale", torch.rand(1, 8))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.layers[0].linear.weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        mask = torch.zeros_like(target)
        mask[:, :4] = 1.0
        mask = mask * (target > 0) * self.scale
        first = self.layers[0](x, mask)
        halves = first.chunk(2, dim=1)
        second = self.layers[1](first, mask)
        third = self.layers[2](second, mask)
        joined = third + torch.cat((halves[1], halves[0]), dim=1)
        return ((self.head(joined) + first - target) ** 2).mean()


def ports(found: Sequence[Port], kind: PortKind) -> list[str]:
    return [port.name for port in found if port.kind is kind]


@pytest.mark.parametrize("boundaries", [[], ["layers.1"], ["layers.1", "layers.2"], ["layers.1", "layers.2", "head"]])
def test_stages_compute_what_the_forward_computes(boundaries: list[str]) -> None:
    torch.manual_seed(0)
    check(Net(), boundaries, torch.randn(4, 8), torch.randn(4, 8))


def test_an_edge_may_skip_stages_and_inputs_are_recomputed_not_sent() -> None:
    torch.manual_seed(0)
    stages = check(Net(), ["layers.1", "layers.2", "head"], torch.randn(4, 8), torch.randn(4, 8))
    first, second, third, last = stages
    assert len(ports(first.outputs, PortKind.EDGE)) == 3  # the layer's output, and its two halves
    skipping = set(ports(first.outputs, PortKind.EDGE)) & set(ports(last.inputs, PortKind.EDGE))
    assert skipping, "the first layer's output reaches the last stage directly"
    for stage in (second, third):
        assert ports(stage.inputs, PortKind.INPUT) == ["1"], "the mask is made again from the target"
        assert ports(stage.inputs, PortKind.BUFFER), "the mask reads the buffer"


def test_a_tied_weight_enters_every_stage_that_uses_it() -> None:
    stages = check(Net(), ["layers.1", "head"], torch.randn(4, 8), torch.randn(4, 8))
    holders = [stage.index for stage in stages if Port(PortKind.PARAMETER, "layers.0.linear.weight") in stage.inputs]
    assert holders == [0, 2]


def test_an_assertion_is_made_on_its_stage_and_there_alone() -> None:
    class Asserting(Layer):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            torch._assert_async((mask >= 0).all(), "masks are positive")
            return super().forward(x, mask)

    model = Net()
    model.layers[1] = Asserting(8)
    capture, _ = captured(model, (torch.randn(4, 8), torch.randn(4, 8)))
    stages = split_stages(capture, ["layers.1", "head"])
    assertions = [[n for n in stage.module.graph.nodes if n.target is torch._assert_async] for stage in stages]
    assert list(map(len, assertions)) == [0, 1, 0]


def test_openers_may_come_in_any_order() -> None:
    model = Net()
    capture, _ = captured(model, (torch.randn(4, 8), torch.randn(4, 8)))
    stages = split_stages(capture, ["head", "layers.1"])
    assert Port(PortKind.PARAMETER, "layers.2.linear.weight") in stages[1].inputs


def test_an_unknown_path_is_an_error_with_a_suggestion() -> None:
    capture, _ = captured(Net(), (torch.randn(4, 8), torch.randn(4, 8)))
    with pytest.raises(
        StageNotFoundError, match=r"'layer.1' names no module whose forward runs.*did you mean 'layers.1'"
    ):
        split_stages(capture, ["layer.1"])


class Positions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], device=x.device).sin()


class WithPositions(nn.Module):
    """One of its modules computes only what every stage computes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.positions = Positions()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        at = self.positions(x)
        return (self.last(first) * at).square().mean()


def test_a_stage_without_work_of_its_own_is_refused_and_never_chosen() -> None:
    capture, distribution = captured(WithPositions(), (torch.randn(4, 8),))
    with pytest.raises(InvalidStagesError, match=r"that begin at 'positions', 'last', stage 1 computes nothing but"):
        split_stages(capture, ["positions", "last"])
    prices = prices_of(distribution.mesh)
    (boundary,) = balance_stages(capture, 2, prices)
    assert len(split_stages(capture, [boundary])) == 2
    with pytest.raises(InvalidStagesError, match="3 stages need 2 places to cut"):
        balance_stages(capture, 3, prices)


def test_what_a_forward_keeps_on_objects_of_its_own_is_neither_sent_nor_returned() -> None:
    batch = class_batch(4)
    capture, _ = captured(FrozenChain(()), batch)
    assert len(capture.kept) == 3 and len(capture.results) == 1
    assert all("frozen_chain.py" in line for line in capture.kept.values())
    first, second = split_stages(capture, ["layers.1"])
    assert len(first.outputs) == len(second.outputs) == 1


def test_only_the_loss_is_differentiated() -> None:
    class TwoResults(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.linear(x)
            return {"output": y, "loss": y.sum()}

    capture, _ = captured(TwoResults(), (torch.randn(2, 4),))
    assert capture.loss == 1
    (stage,) = split_stages(capture, [])
    weights = [torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(2, 4)]
    order = {(4, 4): weights[0], (4,): weights[1], (2, 4): weights[2]}
    names = {"linear.weight": (4, 4), "linear.bias": (4,), "0": (2, 4)}
    output, loss = stage.module(*(order[names[port.name]] for port in stage.inputs))
    assert not output.requires_grad
    assert loss.requires_grad


class Combined(nn.Module):
    """Masks that are combined from ones that the first layer computes from its results, by `&` and `|`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        small, large = hidden < 0.5, hidden > -0.5
        hidden = self.second(hidden) * (small & large)
        return (hidden * (small | large)).sum()


def test_masks_are_combined_without_a_change_in_place() -> None:
    assert len(check(Combined(), ["second"], torch.randn(4, 8))) == 2


class Slope(nn.Module):
    """Differentiates its first two layers by `torch.func`, and returns to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: self.second(self.first(x).tanh()).sum())(x)
        return self.third(slope).square().mean()


def test_stages_begin_outside_of_what_torch_func_transforms() -> None:
    capture, distribution = captured(Slope(), (torch.randn(6, 4),))
    assert balance_stages(capture, 2, prices_of(distribution.mesh)) == ("third",)
    check(Slope(), ["third"], torch.randn(6, 4))
    with pytest.raises(UnsupportedGraphError, match=r"a stage begins inside a function that torch\.func transforms"):
        split_stages(capture, ["second"])
