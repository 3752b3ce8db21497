"""Forwards with `torch.cond`, scans and maps train as on one process, whose functions may read parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop

import fxpar
from fxpar.cache.encode import decode, encode
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.held_graphs import HigherOrderCall
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from fxpar.world.launch import run_ranks
from tests.support.captures import captured
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import compare_copy

mesh = pytest.fixture(mesh_of_one_process)

WIDTH = 4


class Branches(nn.Module):
    """Layers of which a flag of the batch, and the weights themselves, choose."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.cond(self.left.bias.sum() > 0, self.right, lambda x: self.left(x) * 2, (x,))

        chosen: Tensor = torch.cond(flag, lambda x: self.left(x) + self.shift, inner, (x,))
        return chosen


class Loops(nn.Module):
    """A recurrence, sums of all numbers before each, and a function of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return 0.5 * carry + row, carry + row

        _, states = scan(step, torch.zeros_like(x[:, 0]), self.linear(x), dim=1)
        sums: Tensor = associative_scan(lambda a, b: a + b, x, dim=1, combine_mode="generic")
        rows: Tensor = map_rows(lambda row: row.tanh() * row.sum(), x)
        return states + sums + rows


class Net(nn.Module):
    """What is to be trained, between two layers."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.first, self.flow, self.last = nn.Linear(WIDTH, WIDTH), flow, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        loss: Tensor = self.last(self.flow(self.first(x), flag)).square().mean()
        return loss


def batch(*, flag: bool) -> dict[str, Tensor]:
    return {"x": torch.randn(8, WIDTH), "flag": torch.tensor(flag)}


def check(sizes: dict[str, int]) -> None:
    """Compare with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    for flow in (Branches, Loops):
        compare_copy(f"{flow.__name__} on {sizes}", Net(flow()), batch(flag="x" in sizes), mesh, opener="last")


@pytest.mark.parametrize("sizes", [{"x": 2}, {"pipe": 2, "z": 2}], ids=str)
def test_training_equals_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes)


@pytest.mark.parametrize("flow", [Branches, Loops])
def test_inductor_compiles_what_holds_graphs(flow: Callable[[], nn.Module], mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone, given = Net(flow()), batch(flag=False)
    model = copy.deepcopy(alone)
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=given)
    expected, found = alone(**given), torch.compile(model, backend="fxpar")(**given)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        wanted = alone.get_parameter(name).grad
        assert (gradient is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(gradient.full_tensor(), wanted)


@pytest.mark.parametrize("flow", [Branches, Loops])
def test_calls_come_back_from_bytes(flow: Callable[[], nn.Module]) -> None:
    capture, _ = captured(Net(flow()), batch(flag=True))
    (stage,) = split_stages(capture, [])
    nodes = trace_joint(stage, with_backward=True).module.graph.nodes
    calls = [node.target for node in nodes if isinstance(node.target, HigherOrderCall)]
    assert calls
    for call in calls:
        again = decode(encode(call))
        assert str(again) == str(call) == str(HigherOrderCall(again.graphs, again.op, again.places))


class Switched(nn.Module):
    """A layer behind one of two functions, which the module chooses: but for these, the traces are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.doubles = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        chosen = (lambda y: y * 2) if self.doubles else (lambda y: y * 3)
        found: Tensor = torch.cond(flag, chosen, torch.sin, (self.linear(x),))
        return found


def test_programs_whose_functions_differ_are_told_apart(mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone, given = Net(Switched()), batch(flag=True)
    model = copy.deepcopy(alone)
    fxpar.distribute(model, mesh, example_inputs=given)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for doubles in (True, False):
        alone.flow.doubles = model.flow.doubles = doubles
        torch.testing.assert_close(step(**given), alone(**given))


class Repeated(nn.Module):
    """A layer that is applied so often as a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        def again(count: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return count - 1, self.linear(y).tanh()

        _, found = while_loop(lambda count, y: count > 0, again, (flag + 2, x))
        repeated: Tensor = found
        return repeated


def test_a_loop_of_unknown_length_evaluates_but_does_not_train(mesh: fxpar.Mesh) -> None:
    torch.manual_seed(0)
    alone, given = Net(Repeated()), batch(flag=True)
    model = fxpar.distribute(copy.deepcopy(alone), mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    with pytest.raises(UnsupportedGraphError, match=r"while_loop.* in module 'flow' keeps .* how many iterations"):
        step(**given)
    with torch.no_grad():
        torch.testing.assert_close(step(**given), alone(**given))
