"""Over x and y, every weight is used as the shard that its rank stores, and one that cannot be is named."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import OpsWithoutRuleWarning
from fxpar.ir import node_meta
from fxpar.ir.layout import Layout
from fxpar.ir.stage import Port, PortKind
from fxpar.layouts.pins import Pins
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.logical_random import logical_random
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.layouts.laid_out import LaidOut, decomposed, lay_out
from tests.passes.layouts_on_a_plane import (
    LAYERS,
    MODELS,
    PLANE,
    Chain,
    collectives_count,
    laid_out_on_plane,
    local,
    model_graph,
)
from tests.support.captures import captured
from tests.support.small_models import GPT


def test_weights_of_a_chain_and_their_gradients_are_held_by_one_rank_each() -> None:
    joint = decomposed(Chain((48, 96, 48, 96)), torch.randn(512, 48))
    laid = lay_out(joint, Pins(), collectives_count(), y=2, x=2)
    found = [(laid.parameter(f"layers.{i}.weight"), laid.parameter(f"layers.{i}.bias")) for i in range(3)]
    inner, outer = "yx" if found[0][0].startswith("[2@y") else "xy"
    assert found == [
        (f"[2@{inner}*48, 2@{outer}*24]", f"[2@{inner}*48]"),
        (f"[2@{outer}*24, 2@{inner}*48]", f"[2@{outer}*24]"),
        (f"[2@{inner}*48, 2@{outer}*24]", f"[2@{inner}*48]"),
    ]
    assert [laid.gradient(f"layers.{i}.weight") for i in range(3)] == [weight for weight, _ in found]


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_used_as_the_shard_that_its_rank_stores(name: str) -> None:
    check_weights(laid_out_on_plane(name), PLANE)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_weights_are_stored_in_shards_over_a_single_axis(axis: str) -> None:
    check_weights(lay_out(model_graph("gpt"), Pins(), collectives_count(), **{axis: 2}), {axis: 2})


def check_weights(laid: LaidOut, sizes: dict[str, int]) -> None:
    """Each rank has its part of weights and gradients, and no collective makes a weight whole."""
    parts = math.prod(sizes.values())
    weights = {port: layout for port, layout in laid.border.inputs.items() if is_weight(port, layout)}
    assert len(weights) > 4 * LAYERS
    for port, layout in weights.items():
        assert parts * math.prod(local(layout)) == math.prod(layout.shape), f"{port}: {layout}"
        assert laid.border.gradients[port] == layout
    placeholders = laid.joint.module.graph.find_nodes(op="placeholder")
    for node, port in zip(placeholders, laid.joint.inputs, strict=False):
        for user in node.users:
            if port in weights and user.op == "call_function":
                position = user.all_input_nodes.index(node)
                assert node_meta.placed(user).inputs[position] == weights[port], f"{port} at {user}"


def is_weight(port: Port, layout: Layout) -> bool:
    return port.kind is PortKind.PARAMETER and len(layout.shape) > 1


class Symmetric(nn.Module):
    """A product with a matrix and its transpose, added: it cannot be used in shards of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.root = nn.Linear(32, 32, bias=False), nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) @ (self.root + self.root.t())).square().sum()


def test_a_weight_that_cannot_be_used_in_shards_gives_way_and_is_named() -> None:
    joint = decomposed(Symmetric(), torch.randn(512, 32))
    with pytest.warns(UserWarning, match=r"along x \(2\) hold the same of 1 weights .*: root; "):
        laid = lay_out(joint, Pins(), collectives_count(), x=2)
    assert laid.parameter("root") == "[32, 32]"
    assert "@x" in laid.parameter("first.weight"), "the others are sharded as before"


def test_a_dim_that_does_not_divide_is_cut_unevenly() -> None:
    model = GPT(vocabulary=97, width=24, length=12, layers=1)
    tokens = torch.zeros(2, 12, dtype=torch.long)
    joint = decomposed(model, tokens, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        laid = lay_out(joint, Pins(), collectives_count(), y=2, x=2)
    assert sorted(laid.parameter("head.weight").replace("y", "x").split(", ")) == ["2@x*12]", "[2@x*49"]


class Diagonals(nn.Module):
    """Matrices of their diagonals, which no rule shards: of learned rows, and of rows that are always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        fixed = torch.arange(24.0).view(6, 4)
        return self.first(x).diag_embed().square().sum() + fixed.diag_embed().sum()


class Dropping(nn.Module):
    """A random mask, whose numbers come from no data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.first(x), 0.1).square().sum()


def test_dropout_is_not_named_among_ops_that_no_rule_shards() -> None:
    (stage,) = split_stages(captured(Dropping(), (torch.randn(64, 32),))[0], [])
    drawn = logical_random(trace_joint(stage, with_backward=True))
    joint = replace(drawn, module=decompose_for_sharding(drawn.module))
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpsWithoutRuleWarning)
        lay_out(joint, Pins(), collectives_count(), x=2)


def test_ops_that_no_rule_shards_are_named_where_they_depend_on_data() -> None:
    joint = decomposed(Diagonals(), torch.randn(64, 32))
    with pytest.warns(OpsWithoutRuleWarning, match="along x compute 1 ops whole") as given:
        lay_out(joint, Pins(), collectives_count(), x=2)
    (found,) = [each.message for each in given if isinstance(each.message, OpsWithoutRuleWarning)]
    assert found.ops == {"aten.diag_embed.default": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lay_out(joint, Pins(), collectives_count())
