"""Layouts of whole graphs: the collectives that hints lead to, each part of the price, and numbers on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.costs.prices import Prices
from fxpar.errors import InfeasibleLayoutError
from fxpar.hardware.network import Network
from fxpar.ir import node_meta
from fxpar.ir.hints import Grouped, Spec
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.layouts.pins import Pin, Pins
from tests.layouts.laid_out import LaidOut, decomposed, lay_out, pins_of, prices
from tests.support.fake_mesh import fake_mesh
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs
from tests.support.small_models import GPT, hf_gpt2, hf_llama

LAYERS, BATCH, LENGTH, WIDTH, VOCABULARY = 2, 2, 64, 128, 1024
HIDDEN_BYTES = BATCH * LENGTH * WIDTH * 4

COLUMNS: Spec = ("x", None)
ROWS: Spec = (None, "x")
"""Hints on weights [out, in] of `nn.Linear`; those of transformers' `Conv1D` are [in, out]."""

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, str], dict[str, Spec]]] = {
    "gpt": (
        lambda: GPT(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, layers=LAYERS),
        ("tokens", "targets"),
        {"*.qkv.weight": COLUMNS, "*.out.weight": ROWS, "*.up.weight": COLUMNS, "*.down.weight": ROWS}
        | {"tokens.weight": COLUMNS, "head.weight": COLUMNS},
    ),
    "hf_gpt2": (
        lambda: hf_gpt2(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, layers=LAYERS),
        ("input_ids", "labels"),
        {"*.c_attn.weight": ROWS, "*.attn.c_proj.weight": COLUMNS, "*.c_fc.weight": ROWS}
        | {"*.mlp.c_proj.weight": COLUMNS, "*.wte.weight": COLUMNS},
    ),
    "hf_llama": (
        lambda: hf_llama(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, layers=LAYERS),
        ("input_ids", "labels"),
        {f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")}
        | {"*.o_proj.weight": ROWS, "*.down_proj.weight": ROWS}
        | {"*.embed_tokens.weight": COLUMNS, "lm_head.weight": COLUMNS},
    ),
}


def latency_counts() -> Prices:
    """Under which fewer collectives are better than small ones."""
    return prices(latency_us=5.0)


def bytes_count() -> Prices:
    """Under which small collectives are better than few."""
    return prices(latency_us=0.01, saved_us_per_byte=1e-5)


@cache
def model_graph(name: str) -> tuple[JointGraph, Pins]:
    make, arguments, hints = MODELS[name]
    model = make()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return decomposed(model, **dict.fromkeys(arguments, tokens)), pins_of(model, hints)


@cache
def laid_out_model(name: str, weighed: Callable[[], Prices]) -> LaidOut:
    return lay_out(*model_graph(name), weighed(), x=2)


@pytest.mark.parametrize("name", MODELS)
def test_hints_lead_to_megatrons_collectives_where_latency_counts(name: str) -> None:
    """An all-reduce per half-block and direction, one for the vocabulary, three of a number per token for the loss."""
    laid = laid_out_model(name, latency_counts)
    large = 2 * LAYERS + 1
    assert laid.count(backward=False, at_least_bytes=HIDDEN_BYTES) == {"all_reduce": large}
    assert laid.count(backward=False) == {"all_reduce": large + 3}
    assert laid.count(backward=True) == {"all_reduce": large}
    assert {c.num_bytes for c in laid.collectives} == {HIDDEN_BYTES, BATCH * LENGTH * 4, 4}


@pytest.mark.parametrize("name", MODELS)
def test_hints_lead_to_sequence_parallelism_where_bytes_count(name: str) -> None:
    """Each all-reduce is split into a reduce-scatter and an all-gather, and what lies between them is sharded."""
    laid = laid_out_model(name, bytes_count)
    expected = {"reduce_scatter": 2 * LAYERS + 1, "all_gather": 2 * LAYERS + 1}
    assert laid.count(backward=False, at_least_bytes=HIDDEN_BYTES) == expected
    assert laid.count(backward=True, at_least_bytes=HIDDEN_BYTES) == expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weighed", [latency_counts, bytes_count])
def test_a_gradient_lies_as_its_parameter_or_is_still_to_be_summed(name: str, weighed: Callable[[], Prices]) -> None:
    border = laid_out_model(name, weighed).border
    for port, gradient in border.gradients.items():
        parameter = border.inputs[port]
        assert gradient == parameter or (gradient.is_partial and not parameter.axes), f"{port}: {parameter}, {gradient}"


def test_a_plain_hint_on_a_fused_weight_finds_the_digit_of_the_heads() -> None:
    laid = laid_out_model("gpt", latency_counts)
    assert laid.parameter("blocks.0.attention.qkv.weight") == f"[3*2@x*{WIDTH // 2}, {WIDTH}]"
    assert laid.parameter("blocks.0.attention.qkv.bias") == f"[3*2@x*{WIDTH // 2}]", (
        "a bias is sharded as its weight makes it"
    )
    assert laid.gradient("blocks.0.attention.qkv.weight") == f"[3*2@x*{WIDTH // 2}, {WIDTH}]"


def test_the_same_graph_is_laid_out_the_same_way_again() -> None:
    joint, pins = model_graph("gpt")

    def layouts() -> list[node_meta.Placed]:
        lay_out(joint, pins, bytes_count(), x=2)
        return [node_meta.placed(node) for node in joint.module.graph.nodes]

    assert layouts() == layouts()


def test_without_an_automatic_axis_everything_is_replicated() -> None:
    joint, pins = model_graph("gpt")
    laid = lay_out(joint, pins, latency_counts(), data=2)
    assert not laid.collectives
    for node in joint.module.graph.nodes:
        placed = node_meta.placed(node)
        assert not any(layout.axes for layout in (*placed.inputs, *placed.outputs) if layout is not None), node


class Gated(nn.Module):
    """Two products of two matrices each, added up: where columns meet rows, both are partial sums."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a1, self.b1 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.a2, self.b2 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a2(self.a1(x)) + self.b2(self.b1(x))


def test_partial_sums_are_added_before_they_are_reduced() -> None:
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    pins = pins_of(model, {"?1.weight": COLUMNS, "?2.weight": ROWS})
    laid = lay_out(joint, pins, latency_counts(), x=2)
    assert [c.kind for c in laid.collectives] == ["reduce_scatter"], "one reduction, of what is free to leave sharded"


@pytest.mark.parametrize(("edge_bytes_per_us", "layout"), [(1.0, "[2@x*8, 32]"), (1e9, "[16, 32]")])
def test_an_edge_enters_in_shards_where_the_way_between_stages_is_slow(edge_bytes_per_us: float, layout: str) -> None:
    """Sharded, every rank receives half of it, and a gather follows."""
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    edge = Port(PortKind.EDGE, "x")
    joint = replace(joint, inputs=tuple(edge if port.kind is PortKind.INPUT else port for port in joint.inputs))
    weighed = replace(latency_counts(), edge_bytes_per_us=edge_bytes_per_us)
    laid = lay_out(joint, pins_of(model, {"?1.weight": COLUMNS, "?2.weight": ROWS}), weighed, x=2)
    assert str(laid.border.inputs[edge]) == layout


@pytest.mark.parametrize(("gather_bytes_per_us", "layout"), [(100.0, "[2@x*8, 32]"), (0.5, "[16, 32]")])
def test_an_edge_is_gathered_in_the_stage_where_that_is_quicker_than_between(
    gather_bytes_per_us: float, layout: str
) -> None:
    """Each host of the stage lacks all of it. One half could come from the other host instead of from afar."""
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    edge = Port(PortKind.EDGE, "x")
    joint = replace(joint, inputs=tuple(edge if port.kind is PortKind.INPUT else port for port in joint.inputs))
    made = StageBorder({}, {edge: Layout((16, 32), (("x", Shard(0, 2)),))}, {}, {})
    weighed = prices(latency_us=0.0, bytes_per_us=gather_bytes_per_us)
    weighed = replace(weighed, network=Network(bytes_per_us=1.0, chunk_us=1e-3))
    pins = pins_of(model, {"?1.weight": COLUMNS, "?2.weight": ROWS})
    laid = lay_out(joint, pins, weighed, hosts=(0, 1, 2, 3), earlier=[made], pipe=2, x=2)
    assert str(laid.border.inputs[edge]) == layout


class TwoReaders(nn.Module):
    """A value that lies in columns, and two matmuls that need all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wide(x).sin()
        return self.first(x), self.second(x)


def test_a_move_that_two_readers_need_is_made_once() -> None:
    model = TwoReaders()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    laid = lay_out(joint, pins_of(model, {"*.weight": COLUMNS}), latency_counts(), x=2)
    assert [c.kind for c in laid.collectives] == ["all_gather"]


class WholeAndShard(nn.Module):
    """A partial sum that one reader needs whole and another in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(self.up(x))
        return fxpar.shard(y.sin(), (None, None)), fxpar.shard(y.cos(), ("x", None))


def test_a_shard_of_what_is_made_whole_anyway_is_a_slice() -> None:
    model = WholeAndShard()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    pins = pins_of(model, {"up.weight": COLUMNS, "down.weight": ROWS})
    laid = lay_out(joint, pins, latency_counts(), x=2)
    assert [c.kind for c in laid.collectives] == ["all_reduce"]


class Residual(nn.Module):
    """A normalised MLP beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return x.square().sum()


@pytest.mark.parametrize("saved_us_per_byte", [0.0, 2e-3])
def test_the_price_of_saved_values_shards_what_the_backward_reads(saved_us_per_byte: float) -> None:
    model = Residual()
    joint = decomposed(model, torch.randn(16, 32))
    pins = pins_of(model, {"up.weight": COLUMNS, "down.weight": ROWS})
    laid = lay_out(joint, pins, prices(latency_us=2.0, saved_us_per_byte=saved_us_per_byte), x=2)
    split = {"all_reduce", "reduce_scatter", "all_gather"} if saved_us_per_byte else {"all_reduce"}
    assert {c.kind for c in laid.collectives} == split


def test_a_hint_that_does_not_divide_is_ragged_through_the_graph() -> None:
    model = GPT(vocabulary=97, width=24, length=12, layers=1)
    tokens = torch.zeros(2, 12, dtype=torch.long)
    joint = decomposed(model, tokens, tokens)
    pins = pins_of(model, {"tokens.weight": COLUMNS, "head.weight": COLUMNS})
    laid = lay_out(joint, pins, latency_counts(), x=2)
    port = Port(PortKind.PARAMETER, "head.weight")
    assert laid.border.inputs[port] == laid.border.gradients[port] == Layout((97, 24), (("x", Shard(0, 2)),))
    (logits,) = (n for n in joint.module.graph.nodes if "mm" in n.name and node_meta.tensor(n).shape == (24, 97))
    assert node_meta.placed(logits).outputs == (Layout((24, 97), (("x", Shard(1, 2)),)),)


def test_a_grouped_hint_and_an_exact_pin_are_taken_at_their_word() -> None:
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32))
    grouped = pins_of(model, {"a1.weight": (Grouped(4, "x"), None)})
    exact = Pins({Port(PortKind.PARAMETER, "b1.weight"): Pin.exactly(Layout((32, 32), (("x", Shard(1, 2, 2)),)))})
    laid = lay_out(joint, Pins({**grouped.inputs, **exact.inputs}), latency_counts(), x=2)
    assert laid.parameter("a1.weight") == "[4*2@x*4, 32]"
    assert laid.parameter("b1.weight") == "[32, 2*2@x*8]"


def test_hints_that_cannot_both_hold_are_named() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.left.sin() + self.right.cos())

    model = Sum()
    joint = decomposed(model, torch.randn(4, 8), with_backward=False)
    expected = r"(?s)over x \(2 ranks\).*parameter:(left|right): placed as S\(.\), but needed as S\(.\) by aten.add"
    with pytest.raises(InfeasibleLayoutError, match=expected):
        lay_out(joint, pins_of(model, {"left": COLUMNS, "right": ROWS}), latency_counts(), x=2)


def test_a_hint_that_no_op_can_take_is_named() -> None:
    model = Residual()
    joint = decomposed(model, torch.randn(16, 32))
    with pytest.raises(InfeasibleLayoutError, match=r"norm\.weight .*shard dim 0 over x \(64 ranks\)"):
        lay_out(joint, pins_of(model, {"norm.weight": ("x",)}), latency_counts(), x=64)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"x": 3}, {"y": 2, "x": 2}], ids=str)
def test_all_ranks_together_compute_the_joint_graph(sizes: dict[str, int]) -> None:
    """With a ragged hint; arithmetic is so expensive that the search shards whatever it can, over every axis."""
    torch.manual_seed(0)
    model = GPT(vocabulary=11, width=24, heads=4, length=12, layers=1).double()
    tokens = torch.zeros(2, 12, dtype=torch.long)
    joint = decomposed(model, tokens, tokens)
    laid = lay_out(joint, pins_of(model, {"head.weight": COLUMNS}), prices(latency_us=0.01, flops_per_us=10.0), **sizes)
    inputs = inputs_of(joint, 0)
    with fake_mesh(**sizes) as mesh:
        found = run_local_graphs(joint, mesh, inputs)
    check_pieces(joint, mesh, found, joint.module(*inputs))
    assert {c.axis for c in laid.collectives} == sizes.keys()
