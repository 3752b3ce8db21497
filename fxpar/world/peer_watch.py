"""Notice on every rank that one has ended or failed, over backends that tell nobody, and end all waits for it.

On NCCL, `Work.wait` makes a stream wait and returns; the CPU waits where the user reads a value, such as the loss. When
a rank ends, the kernels of the others spin for ever, and no call raises. A step could only notice that by waiting for
its own end, in every step. So a thread of each rank watches instead:

1. It sleeps on the rank's lines (`open_lines`), which the kernel closes when the process at the other end is gone. Over
   the same lines a rank tells that its step has failed. Rank 0 passes on what it learns.
2. What is under way may still end, for `GRACE_S`: a rank may have ended after all that others need of it.
3. If collectives are still under way then, or the host itself waits for others, results are lost. The thread interrupts
   the thread that runs steps, and aborts all communicators: their kernels end, and so does every wait for the device.
   What the wait returns is undefined, but the interrupt, which Python raises before the next line, is a
   `PeerLostError`: nobody sees the value.

A step in a world with a lost rank is refused. No step is slower for all this.

A rank that lives but is stuck is left to NCCL's own watchdog, which ends the process some time after the timeout of the
group. So is a rank that cannot be interrupted, because the abort hangs, or because the device waits for a peer in a
fused kernel instead: it ends with a message after `LAST_RESORT_S`.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread, get_ident
from typing import ClassVar
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist

from fxpar._torch import abort_all_groups, wait_for_collectives
from fxpar.errors import PeerLostError

GRACE_S = 10.0
"""How long collectives that are under way when a rank is lost may take to end."""

LAST_RESORT_S = 60.0
"""How long the thread that runs steps may take to notice that all communicators were aborted."""

_MOST_BYTES = 4000


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that has ended, or whose step has failed, and what is known of it."""

    rank: int
    reason: str

    def encode(self) -> bytes:
        """The message that tells other ranks."""
        return f"{self.rank}\n{self.reason}".encode()[:_MOST_BYTES]

    @classmethod
    def heard(cls, from_rank: int, message: bytes) -> LostRank:
        """The one that `message` tells of; if it is empty, it is the rank at the other end of the line."""
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


class PeerWatch:
    """Watches the ranks at the other ends of `lines` in a thread, until the world is no more."""

    def __init__(self, world: dist.ProcessGroup, lines: Mapping[int, socket.socket]) -> None:
        self.lost: LostRank | None = None
        self._world, self._lines, self._rank = ref(world), lines, dist.get_rank()
        self._first = Lock()
        self._is_noticed = Event()
        self._depth = self._num_waits = 0
        self._runs_steps = get_ident()
        self._woken, self._wake = socket.socketpair()
        finalize(world, self._wake.close).atexit = False
        Thread(target=self._watch, name="peer watch", daemon=True).start()

    def refuse_step(self) -> None:
        """To be called by the thread that runs steps, before each.

        Raises:
            PeerLostError: a rank is lost.
        """
        self._runs_steps = get_ident()
        if self.lost is not None:
            self._is_noticed.set()
            raise self.lost.while_moving("what a step needs")

    def begin_wait(self) -> None:
        """To be called by the thread that runs steps where it begins to do what may wait for others; waits may nest."""
        self._num_waits += self._depth == 0
        self._depth += 1

    def end_wait(self) -> None:
        """To be called where such a wait ends, in whatever way."""
        self._depth -= 1

    def tell(self, reason: str) -> None:
        """Tell all ranks that this one has failed."""
        self._note(LostRank(self._rank, reason))
        with suppress(OSError):
            self._wake.send(b"\0")

    def _note(self, lost: LostRank) -> None:
        """Remember the first rank that is lost, and pass it on; all that follows, follows from it."""
        with self._first:
            if self.lost is not None:
                return
            self.lost = lost
        for line in self._lines.values():
            with suppress(OSError):
                line.sendall(lost.encode())
                line.shutdown(socket.SHUT_WR)  # the end of the message

    def _watch(self) -> None:
        with ExitStack() as opened:
            for each in (self._woken, self._wake, *self._lines.values()):
                opened.enter_context(each)
            heard = self._next()
            if heard is not None:
                self._note(heard)
            while self.lost is not None and self._world() is dist.group.WORLD:
                if self._waits_on():
                    self._end_waits(self.lost)
                    return

    def _waits_on(self) -> bool:
        """After `GRACE_S`: whether collectives of before are still under way, or the same wait goes on."""
        number, until = self._num_waits, time.monotonic() + GRACE_S
        waiting = Thread(target=wait_for_collectives, name="wait for collectives", daemon=True)
        waiting.start()
        waiting.join(GRACE_S)
        time.sleep(max(0.0, until - time.monotonic()))
        return waiting.is_alive() or (self._depth > 0 and number == self._num_waits)

    def _next(self) -> LostRank | None:
        """Sleep until a line says something or is closed, or this rank has failed or left the world (None)."""
        poll = select.poll()
        rank_of = {line.fileno(): rank for rank, line in self._lines.items()}
        for file in (self._woken.fileno(), *rank_of):
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll():
            if file in rank_of:
                return LostRank.heard(rank_of[file], _read(self._lines[rank_of[file]]))
        return None

    def _end_waits(self, lost: LostRank) -> None:
        """Abort all communicators, and interrupt the thread that runs steps, unless it has its own error already."""
        is_interrupted = lost.rank != self._rank and self._interrupt(lost)
        Thread(target=abort_all_groups, name="abort of all process groups", daemon=True).start()
        if is_interrupted and not self._is_noticed.wait(LAST_RESORT_S):
            error = lost.while_moving(_UNKNOWN)
            print(f"PeerLostError: {error}. This wait cannot be ended; the process ends", file=sys.stderr, flush=True)
            os._exit(1)

    def _interrupt(self, lost: LostRank) -> bool:
        """Let Python raise an interrupt as soon as the thread is back from its wait; False if there is no such thread.

        To be called before the wait is ended.
        """
        thread, interrupt = ctypes.c_ulong(self._runs_steps), _interrupt_of(lost, self._is_noticed)
        return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(interrupt)))


_UNKNOWN = "what the device waits for"


def _interrupt_of(lost: LostRank, is_noticed: Event) -> type[LostRankInterrupt]:
    """The class to raise: Python makes the exception itself, without arguments."""

    class Interrupt(LostRankInterrupt):
        def __init__(self) -> None:
            super().__init__(_UNKNOWN, lost.rank, lost.reason)
            is_noticed.set()

    Interrupt.lost = lost
    Interrupt.__name__ = Interrupt.__qualname__ = PeerLostError.__name__
    Interrupt.__module__ = PeerLostError.__module__
    return Interrupt


def _read(line: socket.socket) -> bytes:
    """All that comes before the line is closed."""
    message = b""
    with suppress(OSError):  # such as that of a host that does not answer any more
        while part := line.recv(_MOST_BYTES):
            message += part
    return message


def watch_peers(lines: Mapping[int, socket.socket]) -> None:
    """Watch, in the current world, the ranks at the other ends of `lines`."""
    world = dist.group.WORLD
    assert world is not None, "there are lines in a world alone"
    _watches[world] = PeerWatch(world, lines)


def peer_watch() -> PeerWatch | None:
    """The watch of the current world; None where the backend itself raises errors."""
    world = dist.group.WORLD
    return None if world is None else _watches.get(world)


_watches: WeakKeyDictionary[dist.ProcessGroup, PeerWatch] = WeakKeyDictionary()
