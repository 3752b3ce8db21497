"""One step of a model on a mesh, compared with the same step of the model on one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.errors import OpsWithoutRuleWarning
from fxpar.model.distribution import distribution_of_model
from fxpar.model.resolve_layouts import Layouts
from fxpar.survey.families import Family
from fxpar.survey.heads.head import Batch, cast_floats, chunk

MICROBATCHES = 2

_FLOOR = 1e-3
"""A gradient that is smaller than so much of the largest one may be zero but for rounding."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a rank's step is from that of one process.

    loss_error, gradient_error: relative; of the gradients the largest, relative to the gradient's largest element.
    worst: the parameter that has it.
    share: the part of the parameters that this rank holds.
    without_rule: the ops that this rank found to have no sharding rule, so that all ranks compute them whole.
    by_plan: whether hints came from the authors' plan.
    """

    loss_error: float
    gradient_error: float
    worst: str
    share: float
    without_rule: tuple[str, ...]
    by_plan: bool


class NotTrainableError(Exception):
    """The family does not train in eager mode on one process, so that there is nothing to compare with."""


def compare_step(
    family: Family, sizes: Mapping[str, Any], layouts: Layouts, lowering: str, dtype: torch.dtype = torch.float32
) -> Comparison:
    """Train a family for a step on a mesh of `sizes`, with stages of about equal cost; for `run_ranks`.

    Raises:
        NotTrainableError: it has no step on one process.
        and whatever fails.
    """
    mesh = fxpar.init_mesh(**sizes)
    shards = fxpar.num_batch_shards(mesh)
    alone, batch = comparable(family)
    alone, batch = alone.to(dtype), cast_floats(batch, dtype)
    model = copy.deepcopy(alone)
    expected = _train_alone(alone, batch, shards * MICROBATCHES)
    whole = sum(parameter.numel() for parameter in model.parameters())
    mine = chunk(batch, shards)[fxpar.batch_rank(mesh)]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        fxpar.distribute(model, mesh, layouts=layouts, microbatches=MICROBATCHES, example_inputs=mine)
        step = torch.compile(model, backend="fxpar", options={"lowering": lowering})
        loss: Tensor = step(**mine)["loss"]
    loss.backward()
    without_rule = {op for each in given if isinstance(each.message, OpsWithoutRuleWarning) for op in each.message.ops}
    errors = dict(_gradient_errors(alone, model))
    worst = max(errors, key=errors.__getitem__, default="")
    held = sum(_local(parameter).numel() for parameter in model.parameters())
    loss_error = abs(loss.item() - expected) / abs(expected)
    shipped = distribution_of_model(model, "compare_step").layouts.shipped
    return Comparison(
        loss_error,
        errors.get(worst, 0.0),
        worst,
        held / whole,
        tuple(sorted(without_rule)),
        shipped is not None and bool(shipped.hints),
    )


def compiles_alone(family: Family) -> bool:
    """Whether plain `torch.compile` captures the family's forward as one graph, and its backward; for `run_ranks`."""
    model, batch = comparable(family)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        step(**batch)["loss"].backward()
    except Exception:
        return False
    return True


def comparable(family: Family) -> tuple[nn.Module, Batch]:
    """A model in training mode, or in evaluation mode if it draws random numbers, and the first batch that it takes.

    Raises:
        NotTrainableError: it cannot be built, or takes none.
    """
    failure: Exception | None = None
    for build in family.builds():
        try:
            model = build()
        except Exception as error:
            failure = failure or error
            continue
        for batch in family.batches(model):
            try:
                losses = [_loss_of_seed(copy.deepcopy(model), batch, seed) for seed in range(2)]
            except Exception as error:
                failure = failure or error
            else:
                return (model if losses[0] == losses[1] else model.eval()), batch
    raise NotTrainableError(f"{type(failure).__name__}: {failure}") from failure


def _loss_of_seed(model: nn.Module, batch: Batch, seed: int) -> float:
    """The loss in training mode; that there are gradients is tried as well."""
    torch.manual_seed(seed)
    loss: Tensor = model(**batch)["loss"]
    loss.backward()
    return loss.item()


def _train_alone(model: nn.Module, batch: Batch, pieces: int) -> float:
    """The loss of a step in eager mode, as the mean of those of `pieces` of the batch; gradients are in `grad`."""
    try:
        losses = []
        for piece in chunk(batch, pieces):
            loss = model(**piece)["loss"] / pieces
            loss.backward()
            losses.append(loss.detach())
        found = torch.stack(losses).sum()
    except Exception as error:
        raise NotTrainableError(f"{type(error).__name__}: {error}") from error
    if not found.isfinite():
        raise NotTrainableError(f"its loss is {found}")
    return found.item()


def _gradient_errors(alone: nn.Module, model: nn.Module) -> Iterator[tuple[str, float]]:
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    least = _FLOOR * max(float(each.abs().max()) for each in wanted.values() if each is not None)
    for name, parameter in model.named_parameters():
        right, gradient = wanted[name], parameter.grad
        if right is None or gradient is None:
            # One that is not there stands for zeros.
            present = right if right is not None else gradient
            yield name, 0.0 if present is None else float(_whole(present).abs().max()) / least
        else:
            difference = (_whole(gradient) - right).abs().max()
            yield name, float(difference) / max(float(right.abs().max()), least)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
