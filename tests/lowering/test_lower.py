"""Lowerings by name, and the reference among them."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from fxpar.config import LOWERINGS
from fxpar.lowering import lower
from fxpar.lowering.aten import with_strides_of_single
from tests.lowering.graphs import traced


def test_every_configurable_lowering_can_be_had() -> None:
    assert len({lower(name) for name in LOWERINGS}) == len(LOWERINGS)


def test_aten_runs_the_graph_op_by_op() -> None:
    def function(x: Tensor) -> list[Tensor | None]:
        y = x.t() + 1
        return [y, None, y, x, y[1]]

    x = torch.randn(2, 3)
    graph = traced(function, x)
    found = lower("aten")(graph)(x)
    assert torch.equal(found[0], x.t() + 1) and found[0].stride() == (1, 3)
    assert found[1] is None and found[2] is found[0] and found[3] is x
    assert torch.equal(found[4], found[0][1])


def test_aten_drops_values_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []

    def watched(x: Tensor) -> Tensor:
        held.append(weakref.ref(x))
        return x.exp()

    def dead(x: Tensor) -> Tensor:
        assert held[0]() is None
        return x

    graph = traced(lambda x: (((x + 1).exp() + 1).sin(),), torch.randn(3))
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
        node.target = watched
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = dead
    graph.recompile()
    lower("aten")(graph)(torch.randn(3))
    assert len(held) == 1


def test_aten_takes_views_of_a_single_image_for_what_they_were_in_the_trace() -> None:
    """Its stride of images is arbitrary, but group norm reads the memory order from it."""

    def function(x: Tensor) -> tuple[Tensor]:
        channels_last = x.transpose(1, 2).view(1, 4, 3, 3)
        return (nn.functional.group_norm(channels_last * 2, 2),)

    x = torch.randn(1, 9, 4)
    found = lower("aten")(traced(function, x))(x)
    torch.testing.assert_close(found[0], function(x)[0])


def test_dims_of_one_element_get_other_strides_and_all_elements_stay() -> None:
    """A kernel may return another stride order than its fake value has."""
    found = torch.arange(6.0).view(3, 2).t().unsqueeze(1)
    restored = with_strides_of_single(found, (3, 7, 1))
    assert restored.stride() == (1, 7, 2)
    assert torch.equal(restored, found)


def test_values_are_laid_out_as_planned_before_views_of_them() -> None:
    """Fake padding of channels-last volumes returns contiguous ones, of which this view exists; the kernel does not."""

    def function(x: Tensor) -> tuple[Tensor]:
        return (nn.functional.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate").view(2, -1),)

    x = torch.randn(2, 3, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    (found,) = lower("aten")(traced(function, x))(x)
    assert torch.equal(found, nn.functional.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate").reshape(2, -1))
