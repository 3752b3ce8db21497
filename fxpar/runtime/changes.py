"""Make the changes that the forward makes in place: of parameters before a step, of its arguments after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar._torch.distributed import piece_of
from fxpar._torch.lazy_graph_module import code_of
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.changes import Change
from fxpar.ir.plan import PlannedParameter
from fxpar.runtime.microbatches import Microbatches


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


class ParameterChanges:
    """The changes of parameters, each by a rank on its own piece."""

    def __init__(self, changes: Iterable[Change]) -> None:
        self._changes = [(change, code_of(change.module)) for change in changes]

    def make(self, held: Mapping[str, DTensor]) -> None:
        """Make those of the changes whose parameters this rank holds.

        Args:
            held: this rank's parameters by name; those that one change reads have the same layout.
        """
        pieces = {name: piece_of(parameter) for name, parameter in held.items()}
        own = [(change, compute) for change, compute in self._changes if change.port.name in held]
        with torch.no_grad():
            found = [compute(*(pieces[port.name] for port in change.reads)) for change, compute in own]
            for (change, _), value in zip(own, found, strict=True):
                pieces[change.port.name].copy_(value)


class ArgumentChanges:
    """The changes of arguments, by microbatch."""

    def __init__(self, changes: Iterable[Change], split: Microbatches) -> None:
        self._changes = [(change, code_of(change.module)) for change in changes]
        self._split = split

    def make(self, inputs: Mapping[str, Tensor]) -> None:
        """Make them on what the caller has passed."""
        with torch.no_grad():
            made = [each for change, compute in self._changes for each in self._new_values(change, compute, inputs)]
            for own, value in made:
                own.copy_(value)

    def _new_values(
        self, change: Change, compute: Callable[..., Tensor], inputs: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The part of each microbatch of the argument, and what it is to become."""
        parts = [self._split.views(port.name, inputs[port.name]) for port in change.reads]
        for own, *others in zip(*parts, strict=True):
            yield own, compute(own, *others)
