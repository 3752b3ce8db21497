"""Captured forwards of whole models, as `distribute` sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fxpar.ir.capture import Capture
from fxpar.ir.hints import Entry
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import Distribution
from fxpar.model.logical import install
from fxpar.world.mesh import Mesh


def captured(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    microbatches: int = 1,
    mesh: Mesh | None = None,
    layouts: Mapping[str, Sequence[Entry]] | None = None,
) -> tuple[Capture, Distribution]:
    """What Dynamo captures of `model`, which changes as `distribute` changes it; its parameters stay whole."""
    distribution = Distribution.of(model, mesh or Mesh(), layouts, microbatches)
    install(distribution)
    return capture_forward(model, "cpu", example_inputs), distribution
