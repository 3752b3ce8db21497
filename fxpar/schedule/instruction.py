"""The instructions of programs, which a pipe rank runs one after another in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fxpar.schedule.action import Action
from fxpar.schedule.transfer import Transfer


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Start receiving, and passing on to later targets what they need of it.

    Messages between two ranks match in the order in which they are posted and sent.
    """

    transfer: Transfer

    def __str__(self) -> str:
        return f"post {self.transfer}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Block until the posted receive has arrived."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"wait {self.transfer}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a stage's graph on values that were waited for."""

    action: Action

    def __str__(self) -> str:
        return f"compute {self.action}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending what the last compute made; its memory is held until the send is completed, or the step ends."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True, slots=True)
class Complete:
    """Release what was sent: what this rank has waited for proves that all receivers have it."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"complete {self.transfer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start summing the gradients of a stage's parameters over the ranks that share them."""

    stage: int

    def __str__(self) -> str:
        return f"reduce {self.stage}"


@dataclass(frozen=True, slots=True)
class Free:
    """Release what the action received and made, and what was saved for it, unless this rank still needs it."""

    action: Action

    def __str__(self) -> str:
        return f"free {self.action}"


Instruction: TypeAlias = PostReceive | Wait | Compute | Send | Complete | Reduce | Free
