"""The fake values of a graph under construction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensorMode
from fxpar.graph.graph_writer import LocalGraph
from fxpar.ir.node_meta import tensor, value

aten = torch.ops.aten


class Counting(FakeTensorMode):
    """Counts the ops that run."""

    ran = 0

    def dispatch(self, *args: object, **kwargs: object) -> object:
        self.ran += 1
        return super().dispatch(*args, **kwargs)


@pytest.fixture
def mode() -> Counting:
    return Counting()


def placeholders(local: LocalGraph, *shapes: tuple[int, ...]) -> list[fx.Node]:
    return [local.placeholder(f"given_{number}", shape, torch.empty(shape)) for number, shape in enumerate(shapes)]


def form(found: Tensor) -> tuple[object, ...]:
    return found.shape, found.stride(), found.dtype, found.device


def test_a_call_like_an_earlier_one_has_a_value_of_its_own_without_being_run(mode: Counting) -> None:
    local = LocalGraph(mode)
    with local.on_behalf_of(fx.Graph().placeholder("origin"), backward=False):
        one, other = placeholders(local, (4, 6), (4, 6))
        first = local.call(aten.native_layer_norm.default, one, [6], None, None, 1e-5)
        ran = mode.ran
        second = local.call(aten.native_layer_norm.default, other, [6], None, None, 1e-5)
    assert mode.ran == ran
    assert list(map(form, value(second))) == list(map(form, value(first)))
    assert all(mine is not theirs for mine, theirs in zip(value(second), value(first), strict=True))
    assert all(found.fake_mode is mode for found in value(second))


def test_calls_that_differ_in_the_type_of_a_number_are_told_apart(mode: Counting) -> None:
    local = LocalGraph(mode)
    with local.on_behalf_of(fx.Graph().placeholder("origin"), backward=False):
        numbers = local.call(aten.arange.default, 4)
        assert tensor(local.call(aten.mul.Tensor, numbers, 1)).dtype == torch.int64
        assert tensor(local.call(aten.mul.Tensor, numbers, 1.0)).dtype == torch.float32


def test_a_part_of_a_larger_storage_is_told_from_a_whole(mode: Counting) -> None:
    local = LocalGraph(mode)
    with local.on_behalf_of(fx.Graph().placeholder("origin"), backward=False):
        one, other = placeholders(local, (8, 6), (8, 6))
        parts = [local.call(aten.slice.Tensor, node, 0, 0, 2) for node in (one, other)]
        whole = local.call(aten.clone.default, parts[0])
        views = [local.call(aten.view.default, node, [12]) for node in (whole, parts[1])]
    assert [tensor(part).untyped_storage().nbytes() for part in parts] == [8 * 6 * 4] * 2
    assert [tensor(view).untyped_storage().nbytes() for view in views] == [2 * 6 * 4, 8 * 6 * 4]
