"""Pieces of a graph are equal where the same operations read the same results of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fxpar.graph.equal_pieces import find_equal_pieces


def op(node: fx.Node) -> str:
    return str(node.target)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.relu(torch.sin(x) * weight)


def stack(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    middle = layer(layer(torch.cos(x), a), b)
    return layer(middle, c), middle


def find(function: Callable[..., object]) -> list[tuple[list[str], dict[str, str], dict[str, str]]]:
    """The operations, inputs and outputs of the pieces of the traced function, by names."""
    nodes = [node for node in fx.symbolic_trace(function).graph.nodes if node.op == "call_function"]
    return [
        (
            [node.name for node in piece.nodes],
            {one.name: other.name for one, other in piece.inputs.items()},
            {one.name: other.name for one, other in piece.outputs.items()},
        )
        for piece in find_equal_pieces(nodes, op, 3)
    ]


def test_layers_are_equal_with_other_inputs() -> None:
    assert find(stack) == [
        (["sin_1", "mul_1", "relu_1", "add_1"], {"cos": "add", "a": "b"}, {"add": "add_1"}),
        (["sin_2", "mul_2", "relu_2", "add_2"], {"cos": "add_1", "a": "c"}, {"add": "add_2"}),
    ]


def test_what_all_pieces_read_stays_the_same() -> None:
    def shared(x: Tensor, weight: Tensor) -> Tensor:
        return layer(layer(torch.cos(x), weight), weight)

    ((_, inputs, _),) = find(shared)
    assert inputs == {"cos": "add", "weight": "weight"}


def wired_otherwise(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The same operations three times; in the second piece they read others of its results."""
    first = layer(torch.cos(x), a)
    sine = torch.sin(first)
    second = sine + torch.relu(sine * b)
    return layer(second, c)


def reads_twice(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The third piece reads two different values where the others read one twice."""
    first = layer(torch.cos(x), a)
    second = layer(first, b)
    return first + torch.relu(torch.sin(second) * c)


@pytest.mark.parametrize(("function", "index"), [(wired_otherwise, 2), (reads_twice, 1)])
def test_pieces_that_read_their_values_otherwise_are_not_equal(function: Callable[..., Tensor], index: int) -> None:
    assert [names[0] for names, _, _ in find(function)] == [f"sin_{index}"]


def test_a_piece_computes_what_its_original_computes_of_its_inputs() -> None:
    module = fx.symbolic_trace(stack)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    values: dict[fx.Node, Tensor] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            values[n] = super().run_node(n)
            return values[n]

    Noting(module).run(*torch.randn(4, 5))
    for piece in find_equal_pieces(nodes, op, 3):
        computed = {one: values[other] for one, other in piece.inputs.items()}
        for node in piece.original:
            assert callable(node.target)
            computed[node] = node.target(*fx.map_arg(node.args, computed.__getitem__))
        for one, other in piece.outputs.items():
            assert torch.equal(computed[one], values[other])
