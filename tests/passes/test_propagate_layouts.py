"""Layouts of whole models: the collectives that hints lead to, and numbers on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from fxpar.costs.prices import Prices
from fxpar.ir import node_meta
from fxpar.ir.hints import Spec
from fxpar.ir.stage import JointGraph
from fxpar.layouts.pins import Pins
from tests.layouts.laid_out import LaidOut, decomposed, lay_out, pins_of, prices
from tests.passes.programs_to_lay_out import COLUMNS, ROWS, latency_counts
from tests.support.fake_mesh import fake_mesh
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs
from tests.support.small_models import GPT, hf_gpt2, hf_llama

LAYERS, BATCH, LENGTH, WIDTH, VOCABULARY = 2, 2, 64, 128, 1024
HIDDEN_BYTES = BATCH * LENGTH * WIDTH * 4

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
