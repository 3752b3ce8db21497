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
from fxpar.ir.dtensor import layout_of
from fxpar.ir.plan import PlannedParameter
from fxpar.ir.tiles import shard_of
from fxpar.runtime.microbatches import Microbatches


def check_parameter_changes(changes: Iterable[Change], planned: Mapping[str, PlannedParameter]) -> None:
    """Check that the rank that holds a piece of a parameter which a change is made to holds all that it reads.

    Raises:
        UnsupportedGraphError: it reads a parameter that is on another stage, or, element by element, sharded otherwise.
    """
    for change in changes:
        own = planned[change.port.name]
        for port in change.reads:
            other = planned[port.name]
            if other.stage != own.stage or (change.is_pointwise and other.layout != own.layout):
                raise UnsupportedGraphError(
                    f"{change.line} changes parameter {change.port.name} in place by {port.name}, which is on stage "
                    f"{other.stage} with the layout {other.layout}, instead of stage {own.stage} and {own.layout}: "
                    "expected the same; hint the same layout for both, or change parameters between steps"
                )


class ParameterChanges:
    """The changes of parameters, each by a rank on its own piece.

    coordinate: this rank's, by axis.
    """

    def __init__(self, changes: Iterable[Change], coordinate: Mapping[str, int]) -> None:
        self._changes = [(change, code_of(change.module)) for change in changes]
        self._coordinate = coordinate

    def make(self, held: Mapping[str, DTensor]) -> None:
        """Make those of the changes whose parameters this rank holds; a collective of the ranks of its stages.

        Args:
            held: this rank's parameters by name; those that one pointwise change reads have the same layout.
        """
        own = [(change, compute) for change, compute in self._changes if change.port.name in held]
        with torch.no_grad():
            found = [self._new_piece(change, compute, held) for change, compute in own]
            for (change, _), value in zip(own, found, strict=True):
                piece_of(held[change.port.name]).copy_(value)

    def _new_piece(self, change: Change, compute: Callable[..., Tensor], held: Mapping[str, DTensor]) -> Tensor:
        read = [held[port.name] for port in change.reads]
        if change.is_pointwise:
            return compute(*map(piece_of, read))
        return shard_of(compute(*(each.full_tensor() for each in read)), layout_of(read[0]), self._coordinate)


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
