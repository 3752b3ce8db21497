"""What ranks tell each other of one that is lost, and the error that interrupts a thread that waits for it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from threading import Event
from typing import ClassVar

from fxpar.errors import PeerLostError

MOST_BYTES = 4000
"""The bytes of a message, at most."""

UNKNOWN = "what the device waits for"


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that has ended, or whose step has failed, and what is known of it."""

    rank: int
    reason: str

    def encode(self) -> bytes:
        """The message that tells other ranks."""
        return f"{self.rank}\n{self.reason}".encode()[:MOST_BYTES]

    @classmethod
    def decode(cls, from_rank: int, message: bytes) -> LostRank:
        """The one that `message` tells of; if it is empty, it is the rank at the other end of the connection."""
        rank, _, reason = message.decode(errors="replace").partition("\n")
        return cls(int(rank), reason) if reason else cls(from_rank, "its process has ended, or has left this world")

    def while_moving(self, value: str) -> PeerLostError:
        """The error to raise where `value` was awaited."""
        return PeerLostError(value, self.rank, self.reason)


class LostRankInterrupt(PeerLostError):
    """Raised in the thread that runs steps, wherever it is, after the abort; `naming_lost_peers` names what it awaited.

    `lost` is the lost rank.
    """

    lost: ClassVar[LostRank]


def interrupt(thread: int, lost: LostRank, is_noticed: Event) -> bool:
    """Let Python raise a `LostRankInterrupt` in `thread`, as soon as that is back from what it waits for.

    Returns False if there is no such thread. `is_noticed` is set when the thread has got it.
    """

    class Interrupt(LostRankInterrupt):  # Python makes the exception itself, without arguments
        def __init__(self) -> None:
            super().__init__(UNKNOWN, lost.rank, lost.reason)
            is_noticed.set()

    Interrupt.lost = lost
    Interrupt.__name__ = Interrupt.__qualname__ = PeerLostError.__name__
    Interrupt.__module__ = PeerLostError.__module__
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupt)))
