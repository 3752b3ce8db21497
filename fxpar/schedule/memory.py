"""What a step keeps in memory: the figures of a stage, and the peak that a program makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpar.schedule.action import Kind


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one of its ranks; what differs by microbatch is given for one.

    parameters, gradients, optimizer: there all the time.
    saved_for_inputs: made by F and kept until B, or until I where the backward is split.
    saved_for_weights: made by F and kept until B, or until W.
    carried: made by I and kept until W.
    values, gradients_of: by edge, what one that this stage makes takes, and its gradient that comes back.
    read, returned: by edge, what one that this stage reads takes, and the gradient that it sends back.
    read_until: edges read whose memory is itself saved, with the action that needs it last: "I" or "W". (A whole
        backward needs all until B.) Their bytes are in `read` alone.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    saved_for_inputs: int = 0
    saved_for_weights: int = 0
    carried: int = 0
    values: Mapping[str, int] = field(default_factory=dict)
    gradients_of: Mapping[str, int] = field(default_factory=dict)
    read: Mapping[str, int] = field(default_factory=dict)
    returned: Mapping[str, int] = field(default_factory=dict)
    read_until: Mapping[str, Kind] = field(default_factory=dict)
