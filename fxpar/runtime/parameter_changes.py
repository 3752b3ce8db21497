"""Change parameters as the forward does, on each shard alone, before a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from fxpar._torch.distributed import piece_of
from fxpar._torch.lazy_graph_module import code_of
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.parameter_changes import ParameterChange
from fxpar.ir.plan import PlannedParameter


def check_changes(changes: Iterable[ParameterChange], planned: Mapping[str, PlannedParameter]) -> None:
    """Check that the rank that holds a piece of a parameter which a change is made to holds all that it reads.

    Raises:
        UnsupportedGraphError: it reads a parameter that is on another stage, or sharded otherwise.
    """
    for change in changes:
        for name in change.reads:
            if planned[name] != planned[change.name]:
                raise UnsupportedGraphError(
                    f"{change.line} changes parameter {change.name} in place by {name}, which is on stage "
                    f"{planned[name].stage} with the layout {planned[name].layout}, instead of stage "
                    f"{planned[change.name].stage} and {planned[change.name].layout}: expected the same; hint the same "
                    "layout for both, or change parameters between steps"
                )


def change_parameters(changes: Iterable[ParameterChange], held: Mapping[str, DTensor]) -> None:
    """Make those of the changes whose parameters this rank holds.

    Args:
        held: this rank's parameters by name; those that one change reads have the same layout.
    """
    with torch.no_grad():
        own = [change for change in changes if change.name in held]
        found = [code_of(change.module)(*(piece_of(held[name]) for name in change.reads)) for change in own]
        for change, value in zip(own, found, strict=True):
            piece_of(held[change.name]).copy_(value)
