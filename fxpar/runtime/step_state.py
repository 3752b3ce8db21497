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

    parameters, buffers: of this rank, including tied parameters received from their owners.
    inputs: one tensor per microbatch.
    gathered: by stage, the gathered parameters that its graphs take instead of shards, if gathered once per step.
    posted, sent: handles of receives and sends in flight.
    values: of edges that stages of this rank read.
    gradients: of edges that stages of this rank compute, one from each reader so far.
    leaving: values of edges that stages of this rank compute.
    returning: gradients of edges that stages of this rank read, by edge, stage and microbatch.
    saved: what forwards save for backwards.
    carried: what the graphs of input gradients save for those of weight gradients.
    results: of the forward, by position and microbatch.
    sums: of the gradients of each stage's parameters, over the microbatches so far.
    of_inputs: gradients of inputs, by name and microbatch, from each stage that reads them.
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
    of_inputs: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
