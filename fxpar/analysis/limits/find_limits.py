"""List what limits a step, the most important first."""

from __future__ import annotations

from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.limits.bubble import bubble
from fxpar.analysis.limits.communication import communication
from fxpar.analysis.limits.limit import Limit
from fxpar.analysis.limits.memory import memory
from fxpar.analysis.limits.replication import replication
from fxpar.analysis.predicted_parts import predicted_parts

LEAST_SHARE = 0.03
"""What takes less of a step is not worth a line."""


def find_limits(step: DumpedStep) -> list[Limit]:
    """What limits the step, the largest share first; empty if it hardly does anything but compute."""
    parts = predicted_parts(step)
    found = [*bubble(step, parts), *communication(step, parts), *replication(step, parts), *memory(step)]
    return sorted((limit for limit in found if limit.share >= LEAST_SHARE), key=lambda limit: -limit.share)
