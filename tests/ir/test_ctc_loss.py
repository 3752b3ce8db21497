"""CTC losses train as on one process, also where a mask selects the targets, as in models of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import DataDependentShapeError
from fxpar.ir.ctc_loss import ctc_loss, rows_of_selected
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import compare_copy

mesh = pytest.fixture(mesh_of_one_process)

FRAMES, CLASSES, LABELS = 10, 5, 4


class Recognizer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last, self.options = nn.Linear(6, 8), nn.Linear(8, CLASSES), options

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        log_probs = self.last(self.first(x).relu()).log_softmax(-1).transpose(0, 1)
        counts = (labels != -100) & (labels != 0)
        with torch.backends.cudnn.flags(enabled=False):
            of_selected = functional.ctc_loss(
                log_probs, labels.masked_select(counts), lengths, counts.sum(1), **self.options
            )
        padded = functional.ctc_loss(log_probs, labels.clamp(min=1), lengths, torch.full_like(lengths, 3))
        return of_selected.mean() + padded


def recordings(rows: int) -> dict[str, Tensor]:
    """Of different lengths; labels may be missing anywhere in a row."""
    labels = torch.randint(1, CLASSES, (rows, LABELS))
    labels[1, 2:], labels[2, 0] = -100, 0
    return {"x": torch.randn(rows, FRAMES, 6), "labels": labels, "lengths": FRAMES - torch.arange(rows) % 3}


def check(sizes: dict[str, int]) -> None:
    """Compare with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    for options in ({}, {"zero_infinity": True, "reduction": "none"}):
        compare_copy(
            f"{options} on {sizes}", Recognizer(**options), recordings(8), mesh, opener="last", layouts="search"
        )


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_a_recognizer_trains_as_on_one_process(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [True, False])
def test_the_loss_and_its_gradient_are_those_of_pytorch(reduction: str, zero_infinity: bool) -> None:
    scores = torch.randn(FRAMES, 3, CLASSES, dtype=torch.float64, requires_grad=True)
    targets, inputs, lengths = torch.randint(1, CLASSES, (3, LABELS)), torch.tensor([10, 7, 2]), torch.tensor([4, 0, 4])
    found, expected = (
        loss(scores.log_softmax(-1), targets, inputs, lengths, 0, reduction, zero_infinity)
        for loss in (ctc_loss, functional.ctc_loss)
    )
    torch.testing.assert_close(found, expected)
    if zero_infinity:  # the last sample has more labels than frames
        gradients = [torch.autograd.grad(loss.sum(), scores)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_one_sample_needs_no_batch_dim() -> None:
    log_probs, targets = torch.randn(FRAMES, CLASSES).log_softmax(-1), torch.tensor([2, 1, 4])
    for reduction in ("mean", "sum", "none"):
        given = log_probs, targets, torch.tensor(FRAMES), torch.tensor(3), 0, reduction
        torch.testing.assert_close(ctc_loss(*given), functional.ctc_loss(*given))


def test_selected_labels_keep_their_order_in_their_rows() -> None:
    labels = torch.tensor([[5, 0, 7, 6], [0, 0, 3, 0]])
    rows = rows_of_selected(labels, labels != 0)
    assert rows[:, :3].tolist() == [[5, 7, 6], [3, 0, 0]]


def test_targets_that_are_used_elsewhere_are_refused(mesh: fxpar.Mesh) -> None:
    class Counting(Recognizer):
        def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
            selected = labels.masked_select(labels > 0)
            return super().forward(x, labels, lengths) + selected.float().cumsum(0).mean()

    model = fxpar.distribute(Counting(), mesh)
    with pytest.raises(DataDependentShapeError):
        torch.compile(model, backend="fxpar", options=ATEN)(**recordings(4))
