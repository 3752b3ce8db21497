"""What a row of the benchmark on one GPU says follows from its times."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fxpar.bench.fused.one_gpu import SHAPES, Shape, Times, one_gpu_row


def test_efficiency_is_the_share_of_communication_that_the_best_matmul_hides() -> None:
    row = one_gpu_row(Shape("gather", 8192, 6144, 12288), torch.bfloat16, Times(100.0, 105.0, 80.0, 190.0, 110.0))
    assert row["kernel_over_library"] == pytest.approx(1.05)
    assert row["effective_communication_in_turn_us"] == pytest.approx(90)
    assert row["effective_communication_fused_us"] == pytest.approx(10)
    assert row["efficiency"] == pytest.approx(1 - 10 / 90)
    assert row["ceiling"] == 1.0
    assert "PCIe" in str(row["mode"])


def test_copies_that_take_longer_than_the_matmul_lower_the_ceiling_and_losses_are_shown() -> None:
    row = one_gpu_row(Shape("scatter", 64, 12288, 6144), torch.bfloat16, Times(50.0, 40.0, 160.0, 200.0, 220.0))
    assert row["ceiling"] == pytest.approx(40 / 160)
    assert row["efficiency"] == pytest.approx(1 - 180 / 160)


def test_shapes_are_those_of_the_paper_over_eight_ranks() -> None:
    assert Shape("gather", 8192, 6144, 12288) in SHAPES
    assert Shape("scatter", 8192, 12288, 6144) in SHAPES
    assert all(shape.in_vectors for shape in SHAPES)
