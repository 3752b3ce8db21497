"""All that is alive on a rank during one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fxpar.schedule import Transfer


@dataclass(slots=True)
class StepState:
    """Values by edge and microbatch, or by stage and microbatch.

    parameters, buffers: of this rank, with what it borrowed. inputs: of each microbatch.
    gathered: what the graphs of a stage take instead of its parameters, for those that are gathered once per step.
    values: of edges that stages of this rank read. gradients: of edges that they make, one from each reader so far.
    leaving: values that they make. returning: gradients that they made of what they read, by edge, stage, microbatch.
    saved: what forwards keep for backwards. carried: what input gradients keep for weight gradients.
    sums: of the gradients of each stage's parameters, over the microbatches so far.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Mapping[str, Sequence[Tensor]]
    gathered: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    posted: dict[Transfer, Any] = field(default_factory=dict)
    sent: dict[Transfer, Any] = field(default_factory=dict)
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    leaving: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    returning: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)
    carried: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)
    results: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    sums: dict[int, list[Tensor]] = field(default_factory=dict)
