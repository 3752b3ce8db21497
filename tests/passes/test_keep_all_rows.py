"""Forwards that select rows by masks train as on one process, without shapes that depend on the masks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import DataDependentShapeError, GraphBreakError, UnsupportedGraphError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import compare, compare_copy

mesh = pytest.fixture(mesh_of_one_process)

ROWS, LENGTH, WIDTH, CLASSES = 8, 3, 6, 4

Loss = Callable[["Tagger", Tensor, Tensor], Tensor]


class Tagger(nn.Module):
    """Hidden states (rows, LENGTH, WIDTH), a head, and a loss of them and of labels, negative where there is none."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.first(x).relu(), labels)


def as_token_classifiers_do(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    logits, active = model.head(hidden), labels.view(-1) >= 0
    return functional.cross_entropy(logits.view(-1, CLASSES)[active], labels.view(-1)[active])


def head_of_selected(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    """As models of masked tokens do that score no others."""
    masked = labels >= 0
    logits = model.head(functional.gelu(model.norm(hidden[masked])))
    return functional.cross_entropy(logits, labels[masked], label_smoothing=0.1)


def where_defined(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    """A logarithm that is infinite, or has no gradient, where there is no label."""
    valid = labels >= 0
    depth = hidden.mean(-1) * valid
    return (depth[valid].add(0.1).log() - (labels + 1)[valid].log()).abs().mean()


def by_indices(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    rows = (labels[:, 0] >= 0).nonzero(as_tuple=True)[0]
    others = torch.where(labels[:, 0] < 0)
    return model.head(hidden[rows]).square().mean() + hidden[others].sum(-1).mean()


def experts(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    """Rows of each kind go through a layer of their own, and back to their places."""
    found = torch.zeros_like(hidden)
    for kind, layer in enumerate((model.first, model.norm)):
        chosen = labels[:, 0] % 2 == kind
        found[chosen] = layer(hidden[chosen])
    return (found - hidden).square().mean()


def pairs_of_a_matrix(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    """Tokens, found by rows and columns, are changed and put back by both, or added up by one of them."""
    rows, columns = torch.where(labels >= 0)
    found = hidden.clone()
    found[rows, columns] += model.head(hidden[rows, columns]).sum(-1, keepdim=True)
    sums = torch.zeros(len(hidden), WIDTH).index_add_(0, rows, model.norm(hidden[rows, columns]) * found[rows, columns])
    return found.square().mean() + sums.mean() + labels[rows, columns].float().mean() * hidden.mean()


def columns_of_a_matrix(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    """The indices are the columns of a matrix, and those of a dim that is not the first."""
    places = (labels > 0).nonzero()
    row, column = places[:, 0], places.unbind(1)[1]
    alone = (labels[:, 1] > 0).nonzero().squeeze(1)
    flat = hidden.transpose(0, 1)
    doubled = flat.index_add(1, alone, model.norm(flat[:, alone]), alpha=2)
    put = hidden.index_put((row, column), model.norm(hidden[row, column]), accumulate=True)
    return doubled.square().mean() + put.square().mean() + flat[..., alone, :].mean()


def last_of_several(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    """Of several values for one row the last one stays, as in eager mode on one thread; there all have its gradient."""
    rows, columns = torch.where(labels % 2 == 0)
    found = hidden.mean(1).detach()
    found[rows] = hidden[rows, columns].detach()
    found[rows, :] *= 2
    found[(labels[:, 0] == 1).nonzero().flatten()] = 0.0
    return (found * model.norm(hidden.sum(1))).square().mean()


def weighted_squares(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    return functional.mse_loss(a[mask], b[mask], weight=(b + 1)[mask])


def selected(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return a[mask], b[mask]


LOSSES: dict[str, Loss] = {
    "token classifier": as_token_classifiers_do,
    "head of selected": head_of_selected,
    "where defined": where_defined,
    "by indices": by_indices,
    "experts": experts,
    "pairs of a matrix": pairs_of_a_matrix,
    "columns of a matrix": columns_of_a_matrix,
    "last of several": last_of_several,
    "masks before and after": lambda model, h, y: masks_before_and_after(model, h, y),
    "of losses": lambda model, h, y: functional.cross_entropy(
        model.head(h).flatten(0, 1), y.flatten().clamp(min=0), reduction="none"
    )[y.flatten() >= 0].mean(),
    "masked_select": lambda model, h, y: h.mean(-1).masked_select(y >= 0).square().mean(),
    "squares": lambda model, h, y: functional.mse_loss(*selected(h, 1 - h.detach(), y >= 0)),
    "absolutes": lambda model, h, y: functional.l1_loss(*selected(h[..., 0], y.float(), y > 0)),
    "weighted squares": lambda model, h, y: weighted_squares(h[..., 0], y.float(), y > 0),
    "logits": lambda model, h, y: functional.binary_cross_entropy_with_logits(
        *selected(h[..., 0], (y > 1).float(), y > 0)
    ),
    "mask changed before": lambda model, h, y: mask_changed_before(model, h, y),
    "two masks": lambda model, h, y: h[y > 1].mean() + h[y < 1].square().mean(),
}


def batch() -> dict[str, Tensor]:
    """In each row another number of tokens has a label."""
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH))
    return {"x": torch.randn(ROWS, LENGTH, WIDTH), "labels": labels.where(torch.rand(ROWS, LENGTH) < 0.6, -1)}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_selected_rows_is_that_of_one_process(name: str, mesh: fxpar.Mesh) -> None:
    check_microbatches(LOSSES[name], 2, mesh)


@pytest.mark.parametrize("microbatches", [1, ROWS])
def test_a_microbatch_may_be_all_rows_or_one(microbatches: int, mesh: fxpar.Mesh) -> None:
    def of_all(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([loss(model, hidden, labels) for loss in LOSSES.values()]).sum()

    check_microbatches(of_all, microbatches, mesh)


def check_microbatches(loss: Loss, microbatches: int, mesh: fxpar.Mesh) -> None:
    torch.manual_seed(3)
    alone, given = Tagger(loss), batch()
    model = fxpar.distribute(copy.deepcopy(alone), mesh, microbatches=microbatches)
    losses = alone(**given), torch.compile(model, backend="fxpar", options=ATEN)(**given)
    for each in losses:
        each.backward()
    compare(f"in {microbatches} microbatches", *losses, alone, model)


def check(sizes: dict[str, int]) -> None:
    """Compare with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(3)
    for loss in (as_token_classifiers_do, head_of_selected):
        compare_copy(f"{loss.__name__} on {sizes}", Tagger(loss), batch(), mesh, opener="head", layouts="search")


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_selected_rows_train_on_any_mesh(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes)


def masks_before_and_after(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    """The two masks are computed alike, from what is changed in between."""
    places = labels.clone()
    first = hidden[places >= 0]
    places[places == 1] = -1
    return first.mean() + hidden[places >= 0].square().mean()


def mask_changed_before(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, 0] = True
    mask[labels > 1] = True
    return hidden[mask].square().mean()


def mask_changed_after(model: Tagger, hidden: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    found = hidden[mask]
    mask[:, 0] = False
    return found.square().mean() + hidden[mask].mean()


REFUSED: dict[str, Loss] = {
    "a mask that is changed": mask_changed_after,
    "rows of two random masks": lambda model, h, y: functional.mse_loss(
        h[torch.rand_like(h) > 0.5], h[torch.rand_like(h) > 0.5]
    ),
    "order": lambda model, h, y: h[y >= 0].cumsum(0).mean(),
    "softmax over rows": lambda model, h, y: h[y >= 0].softmax(0).square().sum(),
    "largest": lambda model, h, y: h[y >= 0].amax(),
    "rows of two masks": lambda model, h, y: (
        (h[y >= 0] * h[y.roll(1, 0) >= 0].mean(0)).sum() + (h[y > 0] @ h[y > 1].t()).sum()
    ),
    "assigned elsewhere": lambda model, h, y: h.clone().index_put_((y < 0,), h[y >= 0]).mean(),
    "their number": lambda model, h, y: h[y >= 0].sum() / len(h[y >= 0]),
    "a mask of other rows": lambda model, h, y: h[..., 0].masked_select(y[0] >= 0).mean(),
    "indices as numbers": lambda model, h, y: h.mean() * torch.where(y >= 0)[0].float().mean(),
    "assigned to rows of another mask": lambda model, h, y: (
        h.mean(1).index_add(0, torch.where(y >= 0)[0], h[y > 0]).mean()
    ),
    "pairs": lambda model, h, y: torch.cdist(*selected(h, h + 1, y >= 0)).mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_selected_rows_alone_is_refused(name: str, mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Tagger(REFUSED[name]), mesh)
    with pytest.raises((GraphBreakError, UnsupportedGraphError), match=r"test_keep_all_rows.py"):
        torch.compile(model, backend="fxpar", options=ATEN)(**batch())


def test_selected_rows_are_no_result(mesh: fxpar.Mesh) -> None:
    class Selecting(Tagger):
        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.first(x)
            return hidden.mean(), hidden[labels >= 0]

    model = fxpar.distribute(Selecting(by_indices), mesh)
    with pytest.raises(DataDependentShapeError, match=r"write \(losses \* mask\).sum\(\) / mask.sum\(\)"):
        torch.compile(model, backend="fxpar", options=ATEN)(**batch())
