"""What became of the tensor-parallel plan that a model ships."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fxpar.errors import UnknownStyleError
from fxpar.model.distribution import Distribution
from fxpar.model.logical_parameters import logical_parameters
from fxpar.model.resolve_layouts import ReadEntry
from fxpar.model.shipped_plan import read_shipped_plan


@dataclass(frozen=True, slots=True)
class ShippedPlanFacts:
    """What became of a plan.

    status: "none", where the model ships none; "ignored", without an x axis or with `layouts="search"`; or "read".
    entries: if it was read, what each entry became.
    """

    status: Literal["none", "ignored", "read"]
    entries: Sequence[ReadEntry]


def shipped_plan_facts(model: nn.Module, distribution: Distribution) -> ShippedPlanFacts:
    """What became of the plan of `model`, which was distributed like that."""
    resolved = distribution.layouts
    if resolved.shipped is not None:
        return ShippedPlanFacts("read", resolved.entries)
    try:
        shipped = read_shipped_plan(model, logical_parameters(model), distribution.mesh.x)
    except UnknownStyleError:
        return ShippedPlanFacts("ignored", ())
    return ShippedPlanFacts("none" if shipped is None else "ignored", ())
