"""One reason for the time of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """One reason for the time of a step, or for its memory.

    kind: "bubble", "communication", "replication" or "memory".
    share: of the step's time, or of the memory that a rank has.
    finding: what it is, with figures. advice: what would change it. Code is in backticks.
    """

    kind: str
    title: str
    share: float
    finding: str
    advice: str
