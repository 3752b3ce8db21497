"""A stage that changes in place what another one computed changes a copy, which is what all that comes later reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.costs.prices import prices_of
from fxpar.errors import InvalidStagesError, UnsupportedGraphError
from fxpar.ir.node_meta import program_order
from fxpar.passes.split_stages import split_stages
from fxpar.passes.stages.balance_stages import balance_stages
from tests.support.captures import captured
from tests.support.split_forward import check, check_all

WIDTH, ROWS, LAYERS = 8, 4, 3


def _assign_columns(x: Tensor) -> None:
    x[:, 1] = 0
    x[:, 2] = x[:, 3]


CHANGES: Mapping[str, Callable[[Tensor], Any]] = {
    "an item": lambda x: x[:, 1].zero_(),
    "two items": _assign_columns,
    "a slice": lambda x: x[:, :4].mul_(0.5),
    "a slice of a view": lambda x: x.view(-1, 2, 4)[:, 0].add_(1),
    "a transposed view": lambda x: x.t()[0].mul_(2),
    "itself, by indices": lambda x: x.index_fill_(1, torch.tensor([0, 3]), 0.5),
    "its data": lambda x: x.data[:, 0].mul_(0.5),
}


class Changing(nn.Module):
    """Changes what it is given, then adds to it."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return x + self.linear(x).tanh()


class Lasting(Changing):
    """Returns what it is given, changed: all layers share memory."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 4:] += self.linear(x.clone())[:, 4:]
        self.change(x)
        return x


class Stream(nn.Module):
    """Layers, what one of them is given (and they may change), or a view of it, and dropout at last."""

    def __init__(self, layers: list[nn.Module], kept: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 1)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        kept = self.kept(x)
        for layer in self.layers:
            x = layer(x)
        return (self.head(x + kept) + kept.mean()).square().mean()


@pytest.mark.parametrize("layer", [Changing, Lasting])
@pytest.mark.parametrize("name", CHANGES)
def test_stages_change_copies(name: str, layer: type[Changing]) -> None:
    openers = [f"layers.{number}" for number in range(LAYERS)]
    ways = chain.from_iterable(combinations(openers, count) for count in range(LAYERS + 1))
    check_all(Stream([layer(CHANGES[name]) for _ in range(LAYERS)]), ways, torch.randn(ROWS, WIDTH))


def test_a_layer_may_change_what_a_copied_one_returns() -> None:
    def plain() -> Changing:
        return Changing(lambda x: None)

    layers = [plain(), plain(), Changing(CHANGES["a slice"]), plain()]
    check_all(Stream(layers), [[], ["layers.2"], ["layers.2", "layers.3"]], torch.randn(ROWS, WIDTH))


def test_what_a_layer_has_changed_at_its_end_is_sent_as_it_is() -> None:
    class Returning(Changing):
        def forward(self, x: Tensor) -> Tensor:
            y = x + self.linear(x)
            self.change(y)
            return y

    _, second = check(
        Stream([Returning(CHANGES["an item"]) for _ in range(LAYERS)]), ["layers.1"], torch.randn(ROWS, WIDTH)
    )
    assert not second.module.graph.find_nodes(op="call_method", target="clone")


def test_a_stage_begins_where_the_stream_is_changed_but_for_two_views_of_it() -> None:
    def chosen(kept: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
        model = Stream([Lasting(CHANGES["an item"]) for _ in range(LAYERS)], kept)
        capture, distribution = captured(model, (torch.randn(ROWS, WIDTH),))
        return balance_stages(capture, 3, prices_of(distribution.mesh))

    assert set(chosen(lambda x: x)) <= {f"layers.{number}" for number in range(LAYERS)}
    with pytest.raises(InvalidStagesError, match="no tensor that is on both sides and changed in place"):
        chosen(lambda x: x[:, :1])


def test_two_views_of_what_is_changed_do_not_enter_a_stage() -> None:
    model = Stream([Lasting(CHANGES["an item"]) for _ in range(LAYERS)], lambda x: x[:, :1])
    capture, _ = captured(model, (torch.randn(ROWS, WIDTH),))
    with pytest.raises(UnsupportedGraphError, match=r"in stage 1 .* changes .* of stage 0 in place; open the stage"):
        split_stages(capture, ["layers.1"])


def test_random_numbers_do_not_depend_on_the_copies() -> None:
    class Dropping(Changing):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    capture, _ = captured(Stream([Dropping(CHANGES["an item"]) for _ in range(LAYERS)]), (torch.randn(ROWS, WIDTH),))

    def numbers(openers: list[str]) -> list[int]:
        nodes = [node for stage in split_stages(capture, openers) for node in stage.module.graph.nodes]
        return [program_order(node) for node in nodes if node.target is nn.functional.dropout]

    assert len(numbers([])) == LAYERS
    assert numbers([]) == numbers(["layers.0", "layers.2"])
