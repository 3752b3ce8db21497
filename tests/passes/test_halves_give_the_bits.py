"""Forward, input gradients and weight gradients together are the joint graph, of any model and on any rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fxpar.ir.stage import PortKind
from fxpar.lowering import lower
from fxpar.passes.insert_collectives import collectives, insert_collectives
from tests.passes.backward_halves import Chain, Made, check_bits, gpt
from tests.passes.test_partition import Attention
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.halves import decomposed, joints_of, run_parts, split
from tests.support.local_graphs import inputs_of, pieces_of
from tests.support.lockstep import run_ranks_in_lockstep
from tests.support.placements import at_random, lay_out
from tests.support.small_models import GPT, hf_gpt2, hf_llama


def gpt2() -> Made:
    tokens = torch.randint(96, (2, 12))
    return hf_gpt2(), {"input_ids": tokens, "labels": tokens}, ["transformer.h.1"]


def llama() -> Made:
    tokens = torch.randint(96, (2, 12))
    return hf_llama(), {"input_ids": tokens, "labels": tokens}, ["model.layers.1"]


def attention() -> Made:
    return Attention(), (torch.randn(2, 4, 8), torch.randint(0, 5, (2, 4))), ["qkv", "head"]


@pytest.mark.parametrize("make", [gpt, gpt2, llama, attention])
def test_the_parts_give_the_very_bits_of_the_joint_graph(make: Callable[[], Made]) -> None:
    for joint in joints_of(*make()):
        check_bits(decomposed(joint))


@pytest.mark.parametrize("seed", range(2))
def test_with_collectives_every_rank_gives_the_very_bits_of_its_local_graph(seed: int) -> None:
    tokens = torch.randint(96, (2, 12))
    joint = decomposed(joints_of(GPT(layers=2), (tokens, tokens), ["blocks.1"])[1])
    assert [port.kind for port in joint.gradients].index(PortKind.EDGE) == 0
    num_inputs, num_outputs = len(joint.inputs), len(joint.outputs)
    with fake_mesh(x=2) as mesh:
        lay_out(joint, mesh, at_random(seed))
        ranks = [insert_collectives(joint, as_rank(mesh, rank)) for rank in range(2)]
        values = pieces_of(joint, mesh, inputs_of(joint, seed))
        forwards, halves = zip(*map(split, ranks), strict=True)
        graphs = [rank.module.graph for rank in ranks]
        expected = run_ranks_in_lockstep(graphs, values, mesh)

        graphs = [parts.forward.graph for parts in forwards]
        made = run_ranks_in_lockstep(graphs, [given[:num_inputs] for given in values], mesh)
        saved = [given[num_outputs:] for given in made]
        taken = [[kept[i] for i in half.inputs_saved] for half, kept in zip(halves, saved, strict=True)]
        taken = [[*kept, *given[num_inputs:]] for kept, given in zip(taken, values, strict=True)]
        of_inputs = run_ranks_in_lockstep([half.inputs.graph for half in halves], taken, mesh)
        taken = [[kept[i] for i in half.weights_saved] for half, kept in zip(halves, saved, strict=True)]
        taken = [[*kept, *given[1:]] for kept, given in zip(taken, of_inputs, strict=True)]
        of_weights = run_ranks_in_lockstep([half.weights.graph for half in halves], taken, mesh)
    assert collectives(halves[0].inputs.graph), "the seed shards nothing"
    for rank in range(2):
        found = [*made[rank][:num_outputs], of_inputs[rank][0], *of_weights[rank]]
        assert all(torch.equal(a, b) for a, b in zip(found, expected[rank], strict=True))


class Layer(nn.Module):
    """A layer of one of several kinds, over (rows, 4, 4)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "linear":
                return torch.relu(self.linear(x))
            case "residual":
                return x + self.linear(self.norm(x))
            case "scale":
                return x.transpose(1, 2) * self.scale
            case "halves":
                a, b = self.linear(x).chunk(2, dim=-1)
                return torch.cat([b, a.exp()], dim=-1)
            case "row":
                return torch.cat([x[:1] * self.scale, x[1:].sin()])
            case _:
                return functional.dropout(x * self.scale.sum(), 0.5)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.sampled_from(["linear", "residual", "scale", "halves", "row", "dropout"]), min_size=2, max_size=5),
    st.data(),
)
def test_any_cut_of_any_chain_gives_the_very_bits(kinds: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(1, len(kinds) - 1))
    for joint in joints_of(Chain(*map(Layer, kinds)), (torch.randn(3, 4, 4),), [str(start)]):
        check_bits(joint)


def test_inductor_compiles_both_halves() -> None:
    model = Chain(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    for joint in joints_of(model, (torch.randn(6, 8),), ["1"]):
        parts, halves = split(joint)
        values = inputs_of(joint, seed=1)
        with torch.no_grad():
            found = run_parts(joint, parts, halves, values, lower("inductor"))
        for a, b in zip(found, joint.module(*values), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
