"""Numbers that the loss of a part of the batch is divided by are those of the whole batch, if they are known before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.ir.capture import Capture
from fxpar.ir.stage import PortKind
from fxpar.model.distribution import Distribution
from fxpar.passes.total_over_batch import total_over_batch
from fxpar.runtime.batch_totals import StepTotals
from fxpar.world.mesh import Mesh
from tests.support.captured_part import CapturedPart
from tests.support.captures import captured

ROWS, LENGTH, WIDTH, CLASSES = 8, 3, 4, 5

Loss = Callable[[Tensor, Tensor], Tensor]


class Scorer(nn.Module):
    """Scores of classes for each token, and a loss of them and of labels of which some are negative."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(WIDTH, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.linear(x), labels)


def loss_in_parts(capture: Capture, model: nn.Module, batch: Mapping[str, Tensor], num_parts: int) -> Tensor:
    """The mean of the losses of the parts."""
    known = {(PortKind.PARAMETER, name): value for name, value in model.named_parameters()}
    inputs = {str(position): value for position, value in enumerate(batch.values())}
    totals: dict[str, Tensor] = {}
    if capture.totals is not None:
        split = {port.name: dim for port, dim in capture.batch_dims.items()}
        totals = StepTotals(capture.totals, Mesh(), num_parts, split)(inputs, {})
    losses = []
    for part in range(num_parts):
        mine = totals | {name: value.chunk(num_parts)[part] for name, value in inputs.items()}
        values = known | {(PortKind.INPUT, name): value for name, value in mine.items()}
        (loss,) = CapturedPart(capture, values).results()
        losses.append(loss)
    return torch.stack(losses).mean()


def batch_of(labels: Tensor) -> dict[str, Tensor]:
    return {"x": torch.randn(len(labels), LENGTH, WIDTH), "labels": labels}


def some_labels() -> Tensor:
    """In each row another number of them count."""
    counts = torch.arange(LENGTH) < torch.arange(ROWS)[:, None] % (LENGTH + 1)
    return torch.where(counts, torch.randint(0, CLASSES, (ROWS, LENGTH)), -1)


def capture_of(loss: Loss, batch: Mapping[str, Tensor], num_parts: int) -> tuple[Capture, Distribution, nn.Module]:
    torch.manual_seed(0)
    model = Scorer(loss)
    capture, distribution = captured(model, batch, microbatches=num_parts)
    return capture, distribution, model


def tokens(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, **options)


def by_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of the rows' means: each row's number is its own, that of the rows with any label is the batch's."""
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-1, reduction="none")
    counts = (labels >= 0).sum(1)
    return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()


def changed_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    """As scripts do that leave labels out."""
    counting = labels.clone()
    before = (counting >= 0).sum()
    counting[counting == 2] = -1
    counting[:, 0] = -1
    return tokens(logits, counting) + logits.square().sum() / before


def chained(logits: Tensor, labels: Tensor) -> Tensor:
    """Of the numbers, only the last is used elsewhere."""
    share = (labels >= 0).sum() / (labels == 2).sum().clamp(min=1)
    return logits.square().sum() / (share + 1) + logits.mean()


WHOLE: dict[str, Loss] = {
    "mean": tokens,
    "sum and count": lambda logits, labels: tokens(logits, labels, reduction="sum") / (labels >= 0).sum(),
    "count as a float": lambda logits, labels: tokens(logits, labels, reduction="sum") / (labels >= 0).float().sum(),
    "reciprocal": lambda logits, labels: tokens(logits, labels, reduction="sum") * (1 / (labels >= 0).sum()),
    "shifted and padded": lambda logits, labels: tokens(logits, functional.pad(labels[:, 1:], (0, 1), value=-1)),
    "transposed": lambda logits, labels: tokens(logits.transpose(0, 1), labels.t().contiguous()),
    "one of two": lambda logits, labels: tokens(logits, labels) + logits.square().mean(),
    "rows": by_rows,
    "changed in place": changed_in_place,
    "vector of rows": lambda logits, labels: (logits.square().mean((1, 2)) * labels[:, 0]).sum() / labels[:, 0].sum(),
}


@pytest.mark.parametrize("num_parts", [2, ROWS])
@pytest.mark.parametrize("name", WHOLE)
def test_the_loss_in_parts_is_that_of_the_whole_batch(name: str, num_parts: int) -> None:
    batch = batch_of(some_labels())
    expected_of = Scorer(WHOLE[name])
    capture, distribution, model = capture_of(WHOLE[name], batch, num_parts)
    expected_of.load_state_dict(model.state_dict())
    totalled = total_over_batch(capture, distribution)
    assert totalled.totals is not None
    torch.testing.assert_close(loss_in_parts(totalled, model, batch, num_parts), expected_of(**batch))


def test_a_ratio_of_sums_is_that_of_the_whole_batch() -> None:
    capture, distribution, _ = capture_of(chained, batch_of(some_labels()), 2)
    totals = total_over_batch(capture, distribution).totals
    assert totals is not None
    assert len(totals.results) == 1


@pytest.mark.parametrize("num_labels", [0, 1])
def test_a_lower_bound_is_one_of_the_whole_sum(num_labels: int) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return tokens(logits, labels, reduction="sum") / (labels >= 0).sum().clamp(min=1)

    labels = torch.full((ROWS, LENGTH), -1)
    labels[0, :num_labels] = 2
    batch, alone = batch_of(labels), Scorer(loss)
    capture, distribution, model = capture_of(loss, batch, 4)
    alone.load_state_dict(model.state_dict())
    found = loss_in_parts(total_over_batch(capture, distribution), model, batch, 4)
    torch.testing.assert_close(found, alone(**batch))


def test_a_number_that_is_an_index_stays_an_integer() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        count = (labels >= 0).sum()
        weights = torch.arange(1.0, 100.0)
        return logits.square().sum() * weights.index_select(0, count[None]).sum().clamp(min=1) / count

    capture, distribution, _ = capture_of(loss, batch_of(some_labels()), 2)
    totalled = total_over_batch(capture, distribution)
    (entering,) = [node for node, port in totalled.sources.items() if port.name.startswith("batch_total")]
    assert len(entering.users) == 1


def test_the_graph_of_a_part_takes_the_number_as_an_input() -> None:
    capture, distribution, _ = capture_of(tokens, batch_of(some_labels()), 2)
    totalled = total_over_batch(capture, distribution)
    (entering,) = totalled.module.graph.find_nodes(op="placeholder")[:1]
    assert totalled.sources[entering].name == entering.name == "batch_total_0"
    assert "batch_total_0" not in capture.signature, "the capture itself stays as it is"


EXTREMES: dict[str, Loss] = {
    "largest": lambda logits, labels: logits.mean() / labels.max(),
    "smallest of each column": lambda logits, labels: logits.mean() * (labels.amin(0).sum() + 5),
    "any and all": lambda logits, labels: torch.where(
        (labels == 2).any() & ~(labels >= 0).all(), logits.square(), logits
    ).mean(),
    "an index": lambda logits, labels: logits.index_select(2, labels.max().view(1)).mean(),
    "beside a sum": lambda logits, labels: logits.sum() / ((labels >= 0).sum() * labels.max()),
}


@pytest.mark.parametrize("num_parts", [2, ROWS])
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_of_what_is_known_are_those_of_the_whole_batch(name: str, num_parts: int) -> None:
    batch = batch_of(some_labels())
    capture, distribution, model = capture_of(EXTREMES[name], batch, num_parts)
    changed = total_over_batch(capture, distribution)
    assert changed is not capture
    whole = EXTREMES[name](functional.linear(batch["x"], model.linear.weight, model.linear.bias), batch["labels"])
    torch.testing.assert_close(loss_in_parts(changed, model, batch, num_parts), whole, rtol=1e-6, atol=0)


UNCHANGED: dict[str, Loss] = {
    "no number": lambda logits, labels: logits.square().mean(),
    "of parameters": lambda logits, labels: logits.sum() / (logits > 0).sum(),
    "largest row": lambda logits, labels: (logits.sum((1, 2)) / labels.amax(1)).mean(),
    "largest logit": lambda logits, labels: logits.mean() / logits.max(),
    "of a product over the batch": lambda logits, labels: logits.sum() / (labels @ labels.t()).sum(),
    "classes with probabilities": lambda logits, _: functional.cross_entropy(
        logits[:, 0], torch.ones(len(logits), CLASSES) / CLASSES
    ),
    "a sum": lambda logits, labels: tokens(logits, labels, reduction="sum"),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_is_no_number_of_the_batch_stays(name: str) -> None:
    capture, distribution, _ = capture_of(UNCHANGED[name], batch_of(some_labels()), 2)
    assert total_over_batch(capture, distribution) is capture


def test_one_part_has_the_numbers_of_the_whole_batch_itself() -> None:
    capture, distribution, _ = capture_of(tokens, batch_of(some_labels()), 1)
    assert total_over_batch(capture, distribution) is capture
