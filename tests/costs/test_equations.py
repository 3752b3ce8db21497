"""The performance model says the figures of its paper, in numbers and in print."""

from __future__ import annotations

import math

import pytest
from sympy import Expr

from fxpar.costs import equations as eq
from tests.support.published_models import GPTS

LAYER = {eq.m: 32768, eq.k: 7168, eq.n: 28672}
"""The first matrix of GPT-20B's feed-forward network, for 16 sequences."""
MESH = {eq.size["x"]: 2, eq.size["y"]: 2, eq.size["z"]: 4, eq.size["data"]: 1}
FOUR_PER_HOST = {eq.ranks_per_host: 4}


def evaluated(terms: dict[eq.Term, Expr]) -> dict[eq.Term, float]:
    return {term: float(expression.subs(LAYER | MESH)) for term, expression in terms.items()}


def test_a_layer_of_gpt_20b_sends_the_elements_of_the_paper() -> None:
    assert evaluated(eq.layer_elements()) == {
        ("all_gather", "z"): 38_535_168,
        ("reduce_scatter", "z"): 38_535_168,
        ("all_reduce", "y"): 117_440_512,
        ("all_reduce", "x"): 29_360_128,
        ("all_reduce", "data"): 0,
    }


def test_a_transposed_layer_reduces_its_outputs_over_x_and_its_input_gradients_over_y() -> None:
    sent = evaluated(eq.layer_elements(transposed=True))
    assert sent["all_reduce", "x"] == 117_440_512
    assert sent["all_reduce", "y"] == 29_360_128


def test_on_unequal_axes_a_transposed_layer_is_the_layer_with_x_and_y_exchanged() -> None:
    exchange = {eq.size["x"]: eq.size["y"], eq.size["y"]: eq.size["x"]}
    exchange |= {eq.bandwidth["x"]: eq.bandwidth["y"], eq.bandwidth["y"]: eq.bandwidth["x"]}
    exchanged = eq.layer_time().subs(exchange, simultaneous=True)
    assert (exchanged - eq.layer_time(transposed=True)).simplify() == 0


def test_the_time_of_a_layer_is_that_of_its_terms_one_after_another() -> None:
    betas = {eq.width: 2, **{beta: 1e3 * (1 + number) for number, beta in enumerate(eq.bandwidth.values())}}
    expected = 2 * (29_360_128 / 1e3 + 117_440_512 / 2e3 + 2 * 38_535_168 / 3e3)
    assert float(eq.layer_time().subs(LAYER | MESH | betas)) == pytest.approx(expected)


def test_equations_can_be_printed() -> None:
    assert str(eq.ring_time("all_reduce")) == "2*b*(G - 1)/(G*beta)"
    assert str(eq.layer_times()["all_reduce", "y"]) == "2*m*n*w*(G_y - 1)/(G_x*G_y*G_z*beta_y)"
    assert str(eq.axis_bandwidth("y")) == (
        "Piecewise((beta_intra, G_node >= G_x*G_y), (beta_inter/Min(G_node, G_x), True))"
    )


@pytest.mark.parametrize(
    ("kind", "us"), [("all_gather", 750), ("reduce_scatter", 750), ("all_to_all", 750), ("all_reduce", 1500)]
)
def test_a_ring_of_four_sends_three_quarters_of_a_buffer_or_twice_as_much(kind: eq.CollectiveKind, us: float) -> None:
    assert eq.ring_time_us(kind, buffer_bytes=1e4, num_ranks=4, bytes_per_us=10) == us
    assert float(eq.ring_time(kind).subs({eq.num_bytes: 1e4, eq.ranks: 4, eq.beta: 10})) == us


def test_an_axis_that_hosts_hold_whole_has_their_links_and_others_share_the_network() -> None:
    found = [eq.axis_bandwidth(axis).subs(MESH | FOUR_PER_HOST) for axis in ("x", "y", "z")]
    assert found == [eq.beta_intra, eq.beta_intra, eq.beta_inter / 4]


@pytest.mark.parametrize(
    ("sizes", "axis", "share"),
    [
        ((4, 1, 1, 1), "x", None),  # just fits
        ((8, 1, 1, 1), "x", 1),  # one ring through every host
        ((2, 4, 1, 1), "y", 2),
        ((8, 2, 1, 1), "y", 4),  # no more rings than the host has ranks
        ((1, 1, 1, 4), "data", None),
        ((1, 1, 2, 4), "data", 2),
    ],
)
def test_bandwidth_at_its_boundaries_with_four_ranks_per_host(
    sizes: tuple[int, ...], axis: str, share: int | None
) -> None:
    mesh = {eq.size[name]: count for name, count in zip(eq.AXES, sizes, strict=True)}
    expected = eq.beta_intra if share is None else eq.beta_inter / share
    assert eq.axis_bandwidth(axis).subs(mesh | FOUR_PER_HOST) == expected


@pytest.mark.parametrize(("num_ranks", "count"), [(32, 56), (64, 84), (128, 120), (256, 165), (512, 220), (1024, 286)])
def test_there_are_as_many_meshes_as_in_the_paper(num_ranks: int, count: int) -> None:
    found = list(eq.configurations(num_ranks))
    assert len(found) == count == math.comb(num_ranks.bit_length() - 1 + 3, 3)
    assert len({tuple(mesh.values()) for mesh in found}) == count
    assert all(math.prod(mesh.values()) == num_ranks for mesh in found)


def test_meshes_of_any_number_of_ranks() -> None:
    assert list(eq.configurations(6, ("x", "y"))) == [{"x": x, "y": 6 // x} for x in (1, 2, 3, 6)]


def test_the_arithmetic_of_gpt_80b_is_eight_operations_for_each_weight_and_token_and_more_for_attention() -> None:
    size, tokens, vocabulary = GPTS["GPT-80B"], 2**22, 51_200
    values = {
        eq.sequences: tokens // 2048,
        eq.length: 2048,
        eq.layers: size.num_layers,
        eq.hidden: size.hidden,
        eq.vocabulary: vocabulary,
    }
    flops = float(eq.transformer_flops().subs(values))
    ideal = 8 * tokens * size.num_parameters
    attention, logits = 2048 / (6 * size.hidden), vocabulary / (16 * size.num_layers * size.hidden)
    assert flops == pytest.approx(ideal * (1 + attention + logits))


@pytest.mark.parametrize("name", GPTS)
def test_published_models_are_as_large_as_their_names_say(name: str) -> None:
    billions = float(name.removeprefix("GPT-").removesuffix("B"))
    assert GPTS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.06)
    assert GPTS[name].hidden % GPTS[name].num_heads == 0
