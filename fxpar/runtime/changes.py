"""Make the changes that the forward makes in place: of parameters before a step, of its arguments after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar._torch.distributed import piece_of
from fxpar._torch.lazy_graph_module import code_of
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.changes import Change
from fxpar.ir.plan import PlannedParameter


def check_parameter_changes(changes: Iterable[Change], planned: Mapping[str, PlannedParameter]) -> None:
    """Check that the rank that holds a piece of a parameter which a change is made to holds all that it reads.

    Raises:
        UnsupportedGraphError: it reads a parameter that is on another stage, or sharded otherwise.
    """
    for change in changes:
        own = planned[change.port.name]
        for port in change.reads:
            if (other := planned[port.name]) != own:
                raise UnsupportedGraphError(
                    f"{change.line} changes parameter {change.port.name} in place by {port.name}, which is on stage "
                    f"{other.stage} with the layout {other.layout}, instead of stage {own.stage} and {own.layout}: "
                    "expected the same; hint the same layout for both, or change parameters between steps"
                )


def change_parameters(changes: Iterable[Change], held: Mapping[str, DTensor]) -> None:
    """Make those of the changes whose parameters this rank holds, each on its own piece.

    Args:
        held: this rank's parameters by name; those that one change reads have the same layout.
    """
    with torch.no_grad():
        own = [change for change in changes if change.port.name in held]
        found = [code_of(change.module)(*(piece_of(held[port.name]) for port in change.reads)) for change in own]
        for change, value in zip(own, found, strict=True):
            piece_of(held[change.port.name]).copy_(value)


class ArgumentChanges:
    """The changes of arguments, by microbatch.

    Args:
        batch_dims: the dim along which each argument is split into microbatches; those not named are shared.
    """

    def __init__(self, changes: Iterable[Change], microbatches: int, batch_dims: Mapping[str, int]) -> None:
        self._changes = list(changes)
        self._microbatches, self._batch_dims = microbatches, batch_dims

    def make(self, inputs: Mapping[str, Tensor]) -> None:
        """Make them on what the caller has passed."""
        with torch.no_grad():
            made = [each for change in self._changes for each in self._new_values(change, inputs)]
            for own, value in made:
                own.copy_(value)

    def _new_values(self, change: Change, inputs: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The part of each microbatch of the argument, and what it is to become."""
        compute = code_of(change.module)
        parts = [self._parts(port.name, inputs[port.name]) for port in change.reads]
        for own, *others in zip(*parts, strict=True):
            yield own, compute(own, *others)

    def _parts(self, name: str, value: Tensor) -> Sequence[Tensor]:
        """Views of a value, one for each microbatch."""
        if name in self._batch_dims:
            return value.chunk(self._microbatches, self._batch_dims[name])
        return [value] * self._microbatches
