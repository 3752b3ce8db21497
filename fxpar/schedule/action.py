"""One step of a schedule: which computation of which stage runs on which microbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from fxpar.errors import InvalidScheduleError

Kind: TypeAlias = Literal["F", "I", "W", "B"]
"""F: forward. B: the whole backward, or in its place I: gradients of inputs, then W: gradients of weights."""

_ACTION = re.compile(r"([0-9]+)([FIWB])([0-9]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """Computation `kind` of `stage` on `microbatch`, both counted from 0; prints as `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def is_action(text: str) -> bool:
    """Whether `text` is how an action prints."""
    return _ACTION.fullmatch(text) is not None


def parse_action(text: str) -> Action:
    """The action that prints as `text`, such as `2F0`.

    Raises InvalidScheduleError if no action does.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise InvalidScheduleError(f"{text!r} is not an action: expected stage, kind, microbatch as in '2F0'")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), cast(Kind, kind), int(microbatch))
