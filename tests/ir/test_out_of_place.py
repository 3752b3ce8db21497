"""Operations in place return new values where no view of their operand is read later, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxpar
from fxpar.ir.out_of_place import write_out_of_place
from fxpar.world.launch import run_ranks
from tests.support.parity import compare

NAMES = {"iadd", "imul", "isub", "add_", "mul_", "relu_", "masked_fill_"}


def changes(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """How many operations in place are left, once the graph computes what it did."""
    captured: list[fx.GraphModule] = []

    def capture(module: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        write_out_of_place(module)
        module.graph.lint()
        captured.append(module)
        return module.forward

    torch.compiler.reset()
    expected = function(*(each.clone() for each in inputs))
    given = [each.clone() for each in inputs]
    found = torch.compile(function, backend=capture, fullgraph=True, dynamic=False)(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (module,) = captured
    return sum(
        (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")) in NAMES
        or bool(node.kwargs.get("inplace"))
        for node in module.graph.nodes
    )


def rows() -> Tensor:
    return torch.randn(4, 6)


def test_what_nobody_reads_again_is_rewritten() -> None:
    def chained(x: Tensor, y: Tensor) -> Tensor:
        h = x.exp()
        h += y
        h.mul_(0.5)
        F.relu(h, inplace=True)
        return h.masked_fill_(y > 0, 2.0) * h

    assert changes(chained, rows(), rows()) == 0


def test_another_name_of_the_operand_has_the_new_value() -> None:
    def renamed(x: Tensor) -> Tensor:
        h = other = x.exp()
        h += 1
        return h * other

    assert changes(renamed, rows()) == 0


def view_read_later(x: Tensor) -> Tensor:
    h = x.exp()
    view = h.view(-1)
    h += 1
    return view.sum() + h.sum()


def part_of_another(x: Tensor) -> Tensor:
    h = x.exp()
    part = h[:, :2]
    part += 1
    return h * 2


def argument(x: Tensor) -> Tensor:
    x += 1
    return x * 2


def without_grad(x: Tensor) -> Tensor:
    h = x.exp()
    with torch.no_grad():
        h += 1
    return h * 2


def of_a_narrower_type(x: Tensor) -> Tensor:
    h = x.exp()
    h += torch.ones(6, dtype=torch.float64)
    return h * 2


@pytest.mark.parametrize("kept", [view_read_later, part_of_another, argument, without_grad, of_a_narrower_type])
def test_what_somebody_could_tell_stays_in_place(kept: Callable[[Tensor], Tensor]) -> None:
    assert changes(kept, rows()) == 1


class Adding(nn.Module):
    """Changes what the layer before returns; with `viewed`, reads a view of it afterwards."""

    def __init__(self, viewed: bool) -> None:
        super().__init__()
        self.linear, self.shift, self.viewed = nn.Linear(8, 8), nn.Parameter(torch.randn(8)), viewed

    def forward(self, x: Tensor) -> Tensor:
        view = x.view(-1)
        x += self.shift
        return self.linear(F.relu(x.mul(2), inplace=True)) + (view.view(x.shape) if self.viewed else x)


class Chain(nn.Module):
    """Layers that Dynamo traces once."""

    def __init__(self, viewed: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Adding(viewed) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def check_chain(viewed: bool) -> None:
    """Two stages, the second of which begins with a change in place. For `run_ranks`."""
    mesh = fxpar.init_mesh(pipe=2)
    torch.manual_seed(0)
    alone = Chain(viewed)
    model, x = copy.deepcopy(alone), torch.randn(8, 8)
    fxpar.distribute(model, mesh, stages=["layers.3"], microbatches=2, example_inputs=[x])
    expected, found = alone(x), torch.compile(model, backend="fxpar", options={"lowering": "aten"})(x)
    expected.backward()
    found.backward()
    compare("a change in place", expected, found, alone, model)


@pytest.mark.parametrize("viewed", [False, True])
def test_a_stage_may_begin_with_a_change_in_place(viewed: bool) -> None:
    """With a view, the stage changes a copy; in a copied layer, too, whose views Dynamo has not traced."""
    run_ranks(2, check_chain, viewed)
