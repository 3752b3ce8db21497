"""Many meshes can be weighed by equations alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from fxpar.costs import equations as eq
from fxpar.hardware.cluster import cluster_named
from fxpar.planner.analytic_estimate import Matrix, analytic_bytes, analytic_estimate, matrices_of, rows_of
from fxpar.planner.configuration import Configuration, candidates

A100 = cluster_named("dgx-a100")
LAYER = Matrix(7168, 28672, torch.bfloat16)


def mesh(microbatches: int = 1, **sizes: int) -> Configuration:
    return Configuration({axis: sizes.get(axis, 1) for axis in ("pipe", "data", "z", "y", "x")}, microbatches)


def step_us(matrices: list[Matrix], rows: int, on: Configuration, *, splits_backward: bool = False) -> float:
    """Of what does nothing but multiply."""
    return analytic_estimate(matrices, rows, on, A100, splits_backward=splits_backward).step_us(0.0)


def test_a_transposed_layer_follows_a_plain_one_as_in_the_equations() -> None:
    """On one host, all of whose links are alike: the difference to no mesh is Eq. 9 of either form, and latencies."""
    rows, on = 32768, mesh(x=2, y=4)
    values = {eq.m: rows, eq.k: LAYER.k, eq.n: LAYER.n, eq.width: 2}
    values |= {eq.size[axis]: on.mesh[axis] for axis in eq.AXES}
    values |= dict.fromkeys(eq.bandwidth.values(), A100.intra_bytes_per_us)
    sent = sum(float(eq.layer_time(transposed=transposed).subs(values)) for transposed in (False, True))
    computed = 2 * 6 * LAYER.k * LAYER.n * rows / 312e6 / 8
    latencies = 2 * (math.log2(2) + math.log2(4)) * A100.intra_latency_us
    assert step_us([LAYER, LAYER], rows, on) == pytest.approx(computed + sent + latencies)


def test_data_groups_divide_the_rows() -> None:
    rows = 2**30  # so many that reducing gradients is nothing beside them
    assert step_us([LAYER], rows, mesh(data=8)) == pytest.approx(step_us([LAYER], rows, mesh()) / 8, rel=0.01)


def test_pipelines_divide_the_layers_but_have_bubbles() -> None:
    """A bubble is of one forward and backward, or, where weight gradients can fill it, of one forward."""
    rows = 2**22  # so many that messages are nothing beside them
    alone, on = step_us([LAYER], rows, mesh()), mesh(microbatches=4, pipe=2)
    assert step_us([LAYER], rows, on) == pytest.approx(alone / 2 * (1 + 1 / 4), rel=0.01)
    assert step_us([LAYER], rows, on, splits_backward=True) == pytest.approx(alone / 2 * (1 + 1 / 12), rel=0.01)


def test_the_stage_with_most_layers_counts() -> None:
    rows, on = 2**22, mesh(pipe=4)
    even, uneven = (analytic_estimate([LAYER], rows, on, A100, num_layers=count) for count in (8, 9))
    assert uneven.matmul_us == pytest.approx(even.matmul_us * 12 / 9), "3 of 9 layers, where 2.25 were even"
    assert uneven.other_us(uneven.matmul_us + 3.0) == pytest.approx(9.0), "so the others compute less"


def test_few_rows_take_as_long_as_reading_the_weights() -> None:
    read_us = 3 * 2 * LAYER.k * LAYER.n / A100.memory_bytes_per_us
    assert step_us([LAYER], 1, mesh()) == pytest.approx(read_us, rel=0.01)
    assert step_us([LAYER], 4, mesh(microbatches=4)) == pytest.approx(4 * read_us, rel=0.01)


def test_every_microbatch_pays_the_latency_of_collectives_and_messages() -> None:
    few, many = (analytic_estimate([LAYER], 64, mesh(count, pipe=2, x=8), A100) for count in (1, 64))
    least = A100.intra_latency_us * 3 / 2
    assert few.collectives_us > many.collectives_us > least == pytest.approx(many.collectives_us, rel=0.2)
    assert few.message_us > many.message_us > A100.inter_latency_us


def test_what_is_computed_besides_products_is_told_by_what_a_rank_computes() -> None:
    found = analytic_estimate([LAYER], 4096, mesh(microbatches=2, pipe=2), A100)
    products_us = 2 * found.matmul_us
    assert found.other_us(products_us + 10.0) == pytest.approx(20.0), "by two ranks"
    assert found.other_us(products_us / 2) == 0.0
    assert found.step_us(20.0) == pytest.approx(found.step_us(0.0) + 10.0 * 3 / 2), "with its part of the bubble"


def test_all_axes_but_data_divide_what_a_rank_keeps() -> None:
    whole = 4 * 2 * LAYER.k * LAYER.n
    assert analytic_bytes([LAYER], mesh()) == whole
    assert analytic_bytes([LAYER], mesh(pipe=2, data=2, z=2, y=2, x=2)) == whole / 16


def test_matrices_are_the_parameters_of_several_dims() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 4, 3), nn.LayerNorm(5))
    assert matrices_of(model) == [Matrix(3, 5, torch.float32), Matrix(18, 4, torch.float32)]


def test_rows_are_tokens_or_all_but_features() -> None:
    assert rows_of(torch.zeros(4, 8, dtype=torch.long)) == 32
    assert rows_of(torch.zeros(4, 8, 16)) == 32


def test_configurations_divide_the_batch() -> None:
    found = list(candidates(4, batch_size=4, microbatches=[1, 2]))
    assert all(4 % (each.mesh["data"] * each.mesh["z"] * each.microbatches) == 0 for each in found)
    assert mesh(data=2, x=2, microbatches=2) in found
    assert mesh(data=4, microbatches=2) not in found


def test_without_a_choice_pipelines_have_some_multiples_of_their_ranks_as_microbatches() -> None:
    found = list(candidates(4, batch_size=64, axes=("pipe", "data")))
    assert [each.microbatches for each in found if each.mesh["pipe"] == 2] == [2, 4, 8]
    assert [each.microbatches for each in found if each.mesh["pipe"] == 4] == [4, 8, 16]


def test_without_a_pipeline_more_microbatches_only_save_memory() -> None:
    found = [each for each in candidates(4, batch_size=64, axes=("pipe", "data")) if each.mesh["pipe"] == 1]
    assert [each.microbatches for each in found] == [1, 2, 4, 8, 16]
    assert all(more.only_saves_memory(fewer) for fewer, more in pairwise(found))
    assert not mesh(pipe=2, microbatches=4).only_saves_memory(mesh(pipe=2, microbatches=2))
    assert not mesh(data=2, microbatches=2).only_saves_memory(mesh(z=2))


def test_a_batch_without_rows_is_never_divided() -> None:
    assert all(each.mesh["data"] == each.mesh["z"] == 1 for each in candidates(4, None, [1]))
    assert str(mesh(pipe=2, x=2, microbatches=4)) == "pipe=2 x=2, 4 microbatches"
    assert str(mesh()) == "one rank, 1 microbatch"
