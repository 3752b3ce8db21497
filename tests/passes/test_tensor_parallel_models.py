"""Language models over x and y: products reduce as the equations say, heads and words are split; caches are free."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import fx

from fxpar.bench.models import LLAMA_HINTS
from fxpar.ir import node_meta
from fxpar.ir.layout import Shard
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.memory.activation_memory import activation_memory
from fxpar.passes.partition import partition
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.layouts.laid_out import lay_out, pins_of, prices
from tests.passes.layouts_on_a_plane import (
    LAYERS,
    MODELS,
    PLANE,
    ROWS,
    VOCABULARY,
    WIDTH,
    Sent,
    by_equations,
    laid_out_on_plane,
    local,
    sent,
)
from tests.support.captures import captured
from tests.support.fake_mesh import fake_mesh
from tests.support.halves import decomposed as in_parts
from tests.support.small_models import hf_llama


def reduced_in(name: str, sizes: dict[str, int], *, transposed: bool) -> tuple[Counter[Sent], Counter[Sent]]:
    """What blocks reduce in the forward and in the backward, if the rows of qkv lie over y or, transposed, over x.

    The gradients of weights that read one value are added up before they are reduced.
    """
    forward: Counter[Sent] = Counter()
    backward: Counter[Sent] = Counter()

    def note(width: int, columns: tuple[int, ...], times: int, *, transposed: bool) -> None:
        reduced = [by_equations(ROWS, width, number, sizes, transposed=transposed) for number in columns]
        forward.update({s: times * count for s, count in Counter(result for result, _ in reduced).items()})
        backward[reduced[0][1]] += times

    for columns, rows in zip(MODELS[name].inner, MODELS[name].outer, strict=True):
        note(WIDTH, columns, LAYERS, transposed=transposed)
        note(rows, (WIDTH,), LAYERS, transposed=not transposed)
    return forward, backward


@pytest.mark.parametrize("name", MODELS)
def test_products_of_a_transformer_reduce_as_the_equations_say(name: str) -> None:
    """Along one axis before attention and in the MLP's middle, along the other after both. Norms may gather."""
    laid = laid_out_on_plane(name)
    forward, backward = (
        Counter(s for s in sent(laid, PLANE, backward=direction, at_least=4 * ROWS) if s[0] == "all_reduce")
        for direction in (False, True)
    )
    expected = reduced_in(name, PLANE, transposed=False)
    assert not expected[0] - forward and not expected[1] - backward
    embedding, head = ROWS * WIDTH / 2, ROWS * VOCABULARY / 2
    assert sorted(elements for _, _, elements in (forward - expected[0]).elements()) == [embedding, head]
    assert [elements for _, _, elements in (backward - expected[1]).elements()] == [embedding], "that of the head"
    assert {c.kind for c in laid.collectives} <= {"all_reduce", "all_gather"}


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_split_by_heads_and_the_loss_by_words(name: str) -> None:
    laid = laid_out_on_plane(name)
    nodes = [node for node in laid.joint.module.graph.nodes if node.op == "call_function"]
    attended = [node for node in nodes if "scaled_dot_product" in str(node.target)]
    assert attended
    for node in attended:
        for layout in node_meta.placed(node).inputs[:3]:
            assert layout.placement("x") == Shard(1, 2), f"heads over x: {node}, {layout}"
    logits = [
        layout
        for node in nodes
        for layout in node_meta.placed(node).outputs
        if layout is not None and math.prod(layout.shape) == ROWS * VOCABULARY and is_float(node)
    ]
    assert logits and all(math.prod(local(layout)) <= ROWS * VOCABULARY / 2 for layout in logits)
    assert not [c for c in laid.collectives if c.kind == "all_gather" and c.num_bytes >= 4 * ROWS * VOCABULARY]


def is_float(node: fx.Node) -> bool:
    return node_meta.tensor(node).is_floating_point()


def test_a_cache_that_nobody_reads_costs_no_message_and_no_memory() -> None:
    """That of a decoder is made by a concatenation with nothing, and kept on an object."""
    found = []
    for use_cache in (False, True):
        model = hf_llama(layers=1)
        model.config.use_cache = use_cache
        pins = pins_of(model, LLAMA_HINTS)
        ids = torch.zeros(2, 8, dtype=torch.long)
        capture, _ = captured(model, {"input_ids": ids, "labels": ids})
        assert len(capture.kept) == 2 * use_cache and len(capture.results) == 2
        (stage,) = split_stages(capture, [])
        joint = in_parts(trace_joint(stage, with_backward=True))
        laid = lay_out(joint, pins, prices(), x=2)
        with fake_mesh(x=2) as mesh:
            local = insert_collectives(laid.joint, mesh)
        kept = activation_memory(local, partition(local)).saved_bytes
        found.append((laid.count(backward=False), laid.count(backward=True), kept))
    without, cached = found
    assert cached[:2] == without[:2] and cached[2] <= without[2]
