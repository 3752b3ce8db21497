"""Sequence parallelism by hints: each block gathers twice and scatters twice, forward and backward, and nothing else.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import pytest
import torch
from torch import nn

from fxpar.bench.models import GPT_SEQUENCE_HINTS, LLAMA_SEQUENCE_HINTS, example
from fxpar.compiler import plan_stages
from fxpar.ir.hints import Spec
from fxpar.ir.node_meta import is_backward, module_path
from fxpar.ir.stage import PlannedStage, PortKind
from fxpar.passes.insert_collectives import Collective, collectives, insert_collectives
from fxpar.world.mesh import Mesh
from tests.support.captures import captured
from tests.support.fake_mesh import fake_mesh
from tests.support.local_graphs import check_pieces, inputs_of, run_local_graphs
from tests.support.small_models import hf_llama

LAYERS, BATCH, LENGTH, WIDTH, VOCABULARY = 2, 4, 64, 32, 8192
NUMBERS = BATCH * LENGTH * 4
"""The bytes of one number for each token."""

Sent: TypeAlias = list[tuple[str, str]]
"""What each collective does, and the module for which it does so."""


@dataclass(frozen=True, slots=True)
class Part:
    """Half of a block: after its `norm`, `inner` takes what is gathered, and the sums of `outer` are scattered."""

    norm: str
    inner: str
    outer: str


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its arguments, and the modules that gather and scatter, or whose values are; of several with one value
    it is the first. `embedded` are those that take what is embedded, in the forward, and give it its gradient."""

    build: Callable[[], nn.Module]
    arguments: tuple[str, str]
    hints: Mapping[str, Spec]
    blocks: str
    parts: tuple[Part, Part]
    embedded: tuple[str, str]
    norm: str
    head: str


def gpt() -> nn.Module:
    """The example's model."""
    module = example("gpt")
    model: nn.Module = module.GPT(module.Config(VOCABULARY, context=LENGTH, layers=LAYERS, heads=4, hidden=WIDTH))
    return model


SUBJECTS = {
    "gpt": Subject(
        gpt,
        ("tokens", "targets"),
        GPT_SEQUENCE_HINTS,
        "blocks",
        (Part("attention_norm", "attention.qkv", "attention.out"), Part("mlp_norm", "mlp.fc", "mlp.out")),
        embedded=("blocks.0.attention_norm", ""),
        norm="norm",
        head="head",
    ),
    "llama": Subject(
        lambda: hf_llama(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, layers=LAYERS),
        ("input_ids", "labels"),
        LLAMA_SEQUENCE_HINTS,
        "model.layers",
        (
            Part("input_layernorm", "self_attn.q_proj", "self_attn.o_proj"),
            Part("post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj"),
        ),
        embedded=("model.embed_tokens", "model.embed_tokens"),
        norm="model.norm",
        head="lm_head",
    ),
}


@cache
def laid_out(name: str) -> tuple[PlannedStage, Sequence[Collective]]:
    """The model as one stage on two ranks of x, and the collectives of the first of them."""
    subject = SUBJECTS[name]
    with fake_mesh(x=2) as mesh:
        stage = planned(subject, subject.build(), LENGTH, mesh)
        return stage, collectives(insert_collectives(stage.joint, mesh).module.graph)


def planned(subject: Subject, model: nn.Module, length: int, mesh: Mesh) -> PlannedStage:
    """The model as one stage, laid out by its hints."""
    batch = dict.fromkeys(subject.arguments, torch.zeros(BATCH, length, dtype=torch.long))
    capture, distribution = captured(model, batch, mesh=mesh, layouts=subject.hints)
    distribution.placement = (0,)
    (stage,) = plan_stages(capture, distribution, ())
    return stage


def whole_activations(name: str, *, backward: bool) -> Sent:
    """The collectives of more than a number for each token, in order."""
    found = [c for c in laid_out(name)[1] if is_backward(c.node) == backward and c.num_bytes > NUMBERS]
    assert {c.num_bytes for c in found} == {WIDTH * NUMBERS}
    return [(c.kind, module_path(c.node)) for c in found]


def each_part(subject: Subject) -> list[Part]:
    """The halves of all blocks, with whole paths."""
    return [
        Part(*(f"{subject.blocks}.{number}.{module}" for module in (part.norm, part.inner, part.outer)))
        for number in range(LAYERS)
        for part in subject.parts
    ]


@pytest.mark.parametrize("name", SUBJECTS)
def test_blocks_gather_before_each_pair_of_products_and_scatter_after_it(name: str) -> None:
    subject = SUBJECTS[name]
    expected: Sent = [("reduce_scatter", subject.embedded[0])]
    for part in each_part(subject):
        expected += [("all_gather", part.inner), ("reduce_scatter", part.outer)]
    assert whole_activations(name, backward=False) == [*expected, ("all_gather", subject.head)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_backward_is_the_mirror_image(name: str) -> None:
    """What the forward gathered is kept for the weights' gradients."""
    subject = SUBJECTS[name]
    expected: Sent = [("reduce_scatter", subject.norm)]
    for part in reversed(each_part(subject)):
        expected += [("all_gather", part.outer), ("reduce_scatter", part.norm)]
    assert whole_activations(name, backward=True) == [*expected, ("all_gather", subject.embedded[1])]


@pytest.mark.parametrize("name", SUBJECTS)
def test_only_the_loss_reduces_numbers_of_tokens_besides(name: str) -> None:
    small = [c for c in laid_out(name)[1] if c.num_bytes <= NUMBERS]
    assert small and {c.kind for c in small} == {"all_reduce"}
    assert not any(module_path(c.node).startswith(SUBJECTS[name].blocks) for c in small)


@pytest.mark.parametrize("name", SUBJECTS)
def test_norms_are_whole_and_their_gradients_are_added_up_once_a_step(name: str) -> None:
    border = laid_out(name)[0].border
    norms = [port for port in border.gradients if port.kind is PortKind.PARAMETER and "norm" in port.name]
    assert len(norms) >= 2 * LAYERS + 1
    for port in norms:
        assert not border.inputs[port].axes
        assert border.gradients[port].is_partial, f"{port}: {border.gradients[port]}"


@pytest.mark.parametrize(("sizes", "length"), [({"x": 2}, 12), ({"x": 2}, 11), ({"x": 4}, 10)], ids=str)
def test_all_ranks_compute_the_joint_graph_also_where_the_sequence_does_not_divide(
    sizes: dict[str, int], length: int
) -> None:
    subject = SUBJECTS["gpt"]
    with fake_mesh(**sizes) as mesh:
        joint = planned(subject, subject.build().double(), length, mesh).joint
        inputs = inputs_of(joint, 0)
        found = run_local_graphs(joint, mesh, inputs)
    check_pieces(joint, mesh, found, joint.module(*inputs))
