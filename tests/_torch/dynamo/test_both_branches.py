"""Forwards that branch on values of their tensors train as on one process, whichever branch is taken."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import GraphBreakError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import compare, compare_copy

mesh = pytest.fixture(mesh_of_one_process)

ROWS, WIDTH = 8, 4

Part = Callable[["Model", Tensor, Tensor], Tensor | None]


class Model(nn.Module):
    """A layer, a part that changes what the layer returns, and the mean of the squares of another layer."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.token = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.part, self.seen = part, 0

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        hidden = self.first(x)
        changed = self.part(self, hidden, kinds)
        loss: Tensor = self.last(hidden if changed is None else changed).square().mean()
        return loss


def if_any(model: Model, h: Tensor, kinds: Tensor) -> None:
    mask = kinds == 1
    if mask.any():
        h[mask] = model.other(h[mask])


def if_not_any(model: Model, h: Tensor, kinds: Tensor) -> None:
    for kind in range(3):
        mask = kinds == kind
        if not mask.any():
            continue
        h[mask] += (kind + 1) * model.other(h[mask])


def if_so_many(model: Model, h: Tensor, kinds: Tensor) -> None:
    places = torch.where(kinds > 1)[0]
    if places.numel() > 0:
        h[places] = model.other(h[places]).relu()
    if len(places) == 0:
        h[kinds == 0] = model.other(h[kinds == 0])
    if places.shape[0] >= 1:
        h.index_add_(0, places, h[places])


def if_counted(model: Model, h: Tensor, kinds: Tensor) -> None:
    numbers = torch.bincount(kinds, minlength=3).tolist()
    for kind in range(3):
        if numbers[kind] != 0:
            mask = kinds == kind
            h[mask] = kind * model.other(h[mask])
    if kinds.bincount(minlength=3)[1] > 0 and kinds.max() > 0:
        h[kinds == 1] = 2 * h[kinds == 1]


def if_something_else(model: Model, h: Tensor, kinds: Tensor) -> None:
    """Whether rows are assigned does not depend on whether there are any."""
    if kinds.float().mean() > 1.0:
        h[kinds == 1] = model.other(h[kinds == 1])
        if (kinds == 2).all():
            h[kinds > 0] *= 3
        h[kinds == 2] = 0.5


def if_a_token(model: Model, h: Tensor, kinds: Tensor) -> None:
    mask = kinds == 1
    if mask.sum() > 0:
        h[mask] = model.token
    if kinds.min() > 0:
        h.masked_fill_(mask[:, None], 0.25)
        h.copy_(h.flip(1))


def if_asserted(model: Model, h: Tensor, kinds: Tensor) -> None:
    """An assertion counts only where the branch is taken."""
    mask = kinds == 1
    if mask.any():
        if (kinds > 1).any():
            raise ValueError("expected no other kinds beside 1")
        h[mask] = model.other(h[mask])


def if_any_by_logarithms(model: Model, h: Tensor, kinds: Tensor) -> None:
    mask = (kinds == 1)[:, None] & (h > 0)
    if mask.any():
        h[mask] = h[mask].log() / h[mask]


def with_a_variable_of_its_own(model: Model, h: Tensor, kinds: Tensor) -> None:
    chosen = kinds == 0
    for kind in range(2):
        chosen = kinds == kind
        if chosen.any():
            rows = h[chosen]
            scaled = rows * (kind + 2)
            parts = [scaled]
            parts.append(rows)
            h[chosen] = parts[0] + parts[1]


def another_variable(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    before, found = h, None
    if (kinds == 1).any():
        h = model.other(h)
        found = h
    if kinds.sum() < 5:
        h = h.clamp(min=-0.5)
        h = h * 2
    found = h + before
    return found


def in_place(model: Model, h: Tensor, kinds: Tensor) -> None:
    if (kinds == 1).any():
        h.mul_(2)
        h += 1
    if (kinds == 0).all():
        h.clamp_(min=0.1)


def terms_of_rows(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    """Terms that are no number where there are no rows."""
    total = h.square().mean()
    for kind in (0, 1):
        mask = kinds == kind
        if mask.any():
            total = total + model.other(h[mask]).square().mean()
    found = torch.where(kinds == 2)[0]
    if found.numel() > 0:
        total += functional.cross_entropy(h[found], kinds[found])
        total = total + functional.mse_loss(h[found], torch.ones_like(h[found]))
    return h + total


def a_mean(model: Model, h: Tensor, kinds: Tensor) -> None:
    if (kinds == 1).any():
        h[kinds == 0] = h[kinds == 1].mean()


def otherwise(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    before = h
    if (kinds == 1).any():
        found = model.other(h)
        h = h * 2
    elif kinds.sum() == 0:
        found = h.clamp(min=0.1)
    else:
        scaled = h * kinds.max()
        found = scaled + 1
    return found + h + before


def an_expression(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    return h + (model.other(h) if (kinds == 1).any() else h.relu()) + (1 if model.training else 2)


def early_returns(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    if not (kinds == 1).any():
        return h
    if kinds.min() > 0:
        return model.other(h)
    found = h * 2
    found[kinds == 1] = 1.5
    return found


def in_place_either_way(model: Model, h: Tensor, kinds: Tensor) -> None:
    if kinds.max() > 1:
        h[kinds == 2] = model.other(h[kinds == 2])
        h.mul_(2)
    else:
        h += 1
        h[kinds == 0] = 0.5


TRAIN: dict[str, Part] = {
    part.__name__: part
    for part in (
        if_any,
        if_not_any,
        if_so_many,
        if_counted,
        if_something_else,
        if_a_token,
        if_asserted,
        if_any_by_logarithms,
        with_a_variable_of_its_own,
        another_variable,
        in_place,
        terms_of_rows,
        otherwise,
        an_expression,
        early_returns,
        in_place_either_way,
        a_mean,
    )
}

KINDS = {
    "of each": [0, 1, 2, 1, 0, 0, 2, 1],
    "of the first": [0] * ROWS,
    "of the second": [1] * ROWS,
    "of the last": [2] * ROWS,
    "of two": [2, 1, 1, 2, 2, 2, 1, 1],
}


@pytest.mark.parametrize("name", TRAIN)
def test_what_a_branch_skips_has_no_effect(name: str, mesh: fxpar.Mesh) -> None:
    torch.manual_seed(1)
    alone, x = Model(TRAIN[name]), torch.randn(ROWS, WIDTH)
    model = fxpar.distribute(copy.deepcopy(alone), mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for what, kinds in KINDS.items():
        if name == "if_asserted" and {1, 2} <= {*kinds}:
            continue  # it raises
        check_step(f"{name}, rows {what}", alone, model, step, x, torch.tensor(kinds))
        alone.zero_grad()
        model.zero_grad()


def check_step(what: str, alone: nn.Module, model: nn.Module, step: Callable[..., Tensor], *given: Tensor) -> None:
    """Compare a step with eager mode, where parameters of what is skipped have no gradients instead of zeros."""
    losses = alone(*given), step(*given)
    for loss in losses:
        loss.backward()
    for parameter, other in zip(alone.parameters(), model.parameters(), strict=True):
        if parameter.grad is None and other.grad is not None:
            parameter.grad = torch.zeros_like(parameter)
    compare(what, *losses, alone, model)


def test_an_assertion_in_a_branch_that_is_taken_raises(mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Model(if_asserted), mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    step(torch.randn(ROWS, WIDTH), torch.tensor(KINDS["of the last"]))
    with pytest.raises(RuntimeError, match="the forward raises at"):
        step(torch.randn(ROWS, WIDTH), torch.tensor(KINDS["of each"]))


@pytest.mark.filterwarnings("error::fxpar.errors.BatchMixingWarning")
@pytest.mark.parametrize("name", ["if_any", "if_not_any", "if_so_many", "if_something_else", "if_a_token"])
def test_microbatches_may_differ_in_whether_there_are_rows(name: str, mesh: fxpar.Mesh) -> None:
    torch.manual_seed(1)
    alone, x, kinds = Model(TRAIN[name]), torch.randn(ROWS, WIDTH), torch.tensor(KINDS["of each"])
    model = fxpar.distribute(copy.deepcopy(alone), mesh, microbatches=4)
    check_step(name, alone, model, torch.compile(model, backend="fxpar", options=ATEN), x, kinds)


RAN_ON_RANKS = {
    "if_something_else": "of two",
    "if_a_token": "of two",
    "if_not_any": "of each",
    "otherwise": "of each",
    "early_returns": "of two",
}


def check(sizes: Mapping[str, int]) -> None:
    """Compare with one process. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(1)
    for name, kinds in RAN_ON_RANKS.items():
        batch = {"x": torch.randn(ROWS, WIDTH), "kinds": torch.tensor(KINDS[kinds])}
        compare_copy(f"{name} on {sizes}", Model(TRAIN[name]), batch, mesh, opener="last", layouts="search")


@pytest.mark.parametrize("sizes", [{"data": 2}, {"pipe": 2, "x": 2}], ids=str)
def test_a_condition_on_all_rows_is_one_of_the_whole_batch(sizes: dict[str, int]) -> None:
    run_ranks(math.prod(sizes.values()), check, sizes)


def in_a_list(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    parts = [h]
    if (kinds == 1).any():
        parts.append(model.other(h))
    return torch.stack(parts).sum(0)


def an_attribute(model: Model, h: Tensor, kinds: Tensor) -> None:
    if (kinds == 1).any():
        model.seen += 1
    h *= model.seen


def a_quotient(model: Model, h: Tensor, kinds: Tensor) -> None:
    number = kinds.sum()
    if number > 0:
        h[kinds == 1] = h.sum(0) / number


def a_mean_of_others(model: Model, h: Tensor, kinds: Tensor) -> None:
    if (kinds == 1).any():
        h[kinds == 0] = h[kinds == 2].mean()


def changed_elsewhere(model: Model, h: Tensor, kinds: Tensor) -> None:
    """Whether what the layer returns is changed depends on the branch."""
    if (kinds == 1).any():
        h = model.other(h)
    h += 1


def another_shape(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    if (kinds == 1).any():
        h = h.sum(0)
    return h


def other_results(model: Model, h: Tensor, kinds: Tensor) -> Tensor | None:
    if (kinds == 1).any():
        return model.other(h)
    return None


def a_logarithm(model: Model, h: Tensor, kinds: Tensor) -> None:
    if (h > 0).all():
        h[kinds == 1] = h.log().sum(0)


def a_logarithm_of_rows(model: Model, h: Tensor, kinds: Tensor) -> None:
    """Rows are selected also where the branch is not taken."""
    if (h > 0).all():
        h[kinds == 1] = h[kinds == 1].log()


def statistics(model: Model, h: Tensor, kinds: Tensor) -> None:
    if (kinds == 1).any():
        h[kinds == 1] = model.norm(h).sum(0)


def a_loop_that_ends(model: Model, h: Tensor, kinds: Tensor) -> Tensor:
    for _ in range(3):
        if (h.abs() < 1).all():
            break
        h = h / 2
    return h


REFUSED: dict[str, Part] = {
    part.__name__: part
    for part in (
        in_a_list,
        an_attribute,
        a_quotient,
        a_mean_of_others,
        changed_elsewhere,
        another_shape,
        other_results,
        a_logarithm,
        a_logarithm_of_rows,
        statistics,
        a_loop_that_ends,
    )
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_branch_that_changes_something_else_is_refused(name: str, mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Model(REFUSED[name]), mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    with pytest.raises(GraphBreakError, match=r"test_both_branches.py"):
        step(torch.randn(ROWS, WIDTH), torch.tensor(KINDS["of each"]))


def test_other_traces_stay_as_pytorch_makes_them(mesh: fxpar.Mesh) -> None:
    fxpar.distribute(Model(if_any), mesh)

    def double_if_positive(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.sum() > 0:
            x = x * 2
        return x, torch.bincount(x.abs().long(), minlength=2)

    compiled = torch.compile(double_if_positive, backend="eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for given in (torch.ones(3), torch.full((3,), -3.0)):
            torch.testing.assert_close(compiled(given), double_if_positive(given))
