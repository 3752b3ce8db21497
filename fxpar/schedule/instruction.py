"""The instructions of programs: what a pipe rank does, one after another, in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fxpar.schedule.action import Action
from fxpar.schedule.transfer import Transfer


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Begin to receive, and to pass on what later targets need of it.

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
    """Run a stage's graph on what was waited for."""

    action: Action

    def __str__(self) -> str:
        return f"compute {self.action}"


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send what the last compute made; its memory is taken until that is completed, or the step ends."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True, slots=True)
class Complete:
    """Forget what was sent: by what this rank has waited for, all receivers are known to have it."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"complete {self.transfer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Begin to sum the gradients of a stage's parameters over the ranks that share them."""

    stage: int

    def __str__(self) -> str:
        return f"reduce {self.stage}"


@dataclass(frozen=True, slots=True)
class Free:
    """Forget what the action received, made, and was saved for it, unless another action of this rank needs it."""

    action: Action

    def __str__(self) -> str:
        return f"free {self.action}"


Instruction: TypeAlias = PostReceive | Wait | Compute | Send | Complete | Reduce | Free
