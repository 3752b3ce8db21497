"""Copies of a layer that Dynamo traced once are what it would have traced, and are guarded as that would be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar._torch.dynamo.layer_copy import LayerCopy
from fxpar._torch.dynamo.layers import Layers
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import module_path
from fxpar.model.distribution import Distribution
from fxpar.model.logical import install
from fxpar.world.mesh import Mesh
from tests.support.equal_layers import CALLS, LAYERS, MODELS, STATE, Chain, InPlace, chain, rows


def distributed(make: Callable[[], nn.Module]) -> Distribution:
    torch.manual_seed(0)
    distribution = Distribution.of(make(), Mesh(), None, 1, None)
    install(distribution)
    return distribution


def capture(distribution: Distribution, make_inputs: Callable[[], Any]) -> Capture:
    torch.manual_seed(1)
    CALLS[0], STATE.value = 0, 1.0
    return distribution.tracer.capture("cpu", make_inputs())


def operations(captured: Capture) -> list[tuple[Any, ...]]:
    """The operations in order, without the model's handle, which markers have last."""

    def described(node: fx.Node) -> str:
        return str((node.args[:-1] if str(node.target).startswith("fxpar") else node.args, node.kwargs))

    return [
        (node.name, str(node.target), described(node), module_path(node), type_of(node.meta.get("example_value")))
        for node in captured.module.graph.nodes
    ]


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}"
    return str(list(map(type_of, value))) if isinstance(value, tuple | list) else repr(value)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Has an item for each layer that was copied."""
    found: list[None] = []
    write = LayerCopy.write

    def counted(copy: Any) -> Any:
        result = write(copy)
        found.append(None)
        return result

    monkeypatch.setattr(LayerCopy, "write", counted)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_what_would_have_been_traced(name: str, copies: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    make, make_inputs, num_copies = MODELS[name]
    found = capture(distributed(make), make_inputs)
    assert len(copies) == num_copies
    monkeypatch.setattr(Layers, "call", lambda self, layer, tx, args, kwargs, trace: trace(layer, tx, args, kwargs))
    expected = capture(distributed(make), make_inputs)
    assert operations(found) == operations(expected)
    names = Counter(port.name for port in found.sources.values())
    assert names == Counter(port.name for port in expected.sources.values())


def test_memory_that_layers_change_is_their_own() -> None:
    captured = capture(distributed(lambda: chain(layer=InPlace)), rows)
    changed = [node for node in captured.module.graph.nodes if node.target == "add_"]
    storages = {node.args[0].meta["example_value"].untyped_storage()._cdata for node in changed}
    assert len(storages) == len(changed) == LAYERS


CHANGES: dict[str, Callable[[Chain], Any]] = {
    "an attribute": lambda model: setattr(model.layers[4], "scale", 3.0),
    "an option of a module in a layer": lambda model: setattr(model.layers[3].norm, "eps", 1e-2),
    "evaluation": lambda model: model.layers[3].eval(),
    "another forward": lambda model: setattr(model.layers[4], "forward", lambda x: x),
    "the shape of a buffer": lambda model: setattr(model.layers[4], "shift", torch.zeros(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_copied_layer_is_noticed(name: str, copies: list[None]) -> None:
    distribution = distributed(chain)
    first = capture(distribution, rows)
    assert len(copies) == LAYERS - 2
    assert capture(distribution, rows) is first
    assert isinstance(distribution.model, Chain)
    CHANGES[name](distribution.model)
    assert capture(distribution, rows) is not first


def test_a_model_that_is_traced_again_is_not_taken_for_the_one_before(copies: list[None]) -> None:
    distribution = distributed(chain)
    capture(distribution, rows)
    assert isinstance(distribution.model, Chain)
    for layer in distribution.model.layers:
        layer.scale = 7.0
    graph = capture(distribution, rows).module.graph
    assert {node.args[1] for node in graph.nodes if "mul" in str(node.target)} == {7.0}
