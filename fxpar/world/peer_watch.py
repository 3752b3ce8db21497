"""Notice on every rank that one has ended or failed, over backends that tell nobody, and end all waits for it.

On NCCL, `Work.wait` makes a stream wait and returns; the CPU waits where the user reads a value, such as the loss. When
a rank ends, the kernels of the others spin for ever, and no call raises. A step could only notice that by waiting for
its own end, in every step. So a thread of each rank watches instead:

1. It sleeps on the connections of the rank (`open_connections`), which the kernel closes when the process at the other
   end is gone. Over them a rank also tells that its step has failed. Rank 0 passes on what it learns.
2. What is under way may still end, for `GRACE_S`: a rank may have ended after all that others need of it.
3. If collectives are still under way then, or the host itself waits for others, results are lost. The thread interrupts
   the thread that runs steps, and aborts all communicators: their kernels end, and so does every wait for the device.
   What the wait returns is undefined, but the interrupt, which Python raises before the next line, is a
   `PeerLostError`: nobody sees the value.

A step in a world with a lost rank is refused. No step is slower for all this.

A rank that cannot be interrupted, because the abort hangs, or because the device waits for a peer in a fused kernel,
ends with a message after `LAST_RESORT_S`. A peer that lives but is stuck is left to NCCL's own watchdog, which ends the
process some time after the timeout of the group.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Lock, Thread, get_ident
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist

from fxpar._torch.distributed import abort_all_groups, wait_for_collectives
from fxpar.world.lost_rank import MOST_BYTES, UNKNOWN, LostRank, interrupt

GRACE_S = 10.0
"""How long collectives that are under way when a rank is lost may take to end."""

LAST_RESORT_S = 60.0
"""How long the thread that runs steps may take to notice that all communicators were aborted."""


class PeerWatch:
    """Watches the ranks at the other ends of `connections` in a thread, until the world is no more."""

    def __init__(self, world: dist.ProcessGroup, connections: Mapping[int, socket.socket]) -> None:
        self.lost: LostRank | None = None
        self._world, self._connections, self._rank = ref(world), connections, dist.get_rank()
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

    def report_failure(self, reason: str) -> None:
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
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(lost.encode())
                connection.shutdown(socket.SHUT_WR)  # the end of the message

    def close(self) -> None:
        """Close the connections of this process; those of the process that it was forked from stay open."""
        for each in (self._woken, self._wake, *self._connections.values()):
            each.close()

    def _watch(self) -> None:
        heard = self._next()
        if heard is not None:
            self._note(heard)
        while self.lost is not None and self._is_current():
            if self._waits_on() and self._is_current():
                self._end_waits(self.lost)
                break
        self.close()

    def _is_current(self) -> bool:
        """Whether this process is still in the world that is watched."""
        world = self._world()
        return world is not None and world is dist.group.WORLD

    def _waits_on(self) -> bool:
        """After `GRACE_S`: whether collectives of before are still under way, or the same wait goes on."""
        number, until = self._num_waits, time.monotonic() + GRACE_S
        waiting = Thread(target=wait_for_collectives, name="wait for collectives", daemon=True)
        waiting.start()
        waiting.join(GRACE_S)
        time.sleep(max(0.0, until - time.monotonic()))
        return waiting.is_alive() or (self._depth > 0 and number == self._num_waits)

    def _next(self) -> LostRank | None:
        """Sleep until a connection says something or is closed, or this rank has failed or left the world (None)."""
        poll = select.poll()
        rank_of = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for file in (self._woken.fileno(), *rank_of):
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll():
            if file in rank_of:
                return LostRank.decode(rank_of[file], _read(self._connections[rank_of[file]]))
        return None

    def _end_waits(self, lost: LostRank) -> None:
        """Abort all communicators, and interrupt the thread that runs steps, unless it has its own error already."""
        # Before the abort: Python raises the interrupt as soon as the thread is back from its wait.
        is_interrupted = lost.rank != self._rank and interrupt(self._runs_steps, lost, self._is_noticed)
        Thread(target=abort_all_groups, name="abort of all process groups", daemon=True).start()
        if is_interrupted and not self._is_noticed.wait(LAST_RESORT_S):
            error = lost.while_moving(UNKNOWN)
            print(f"PeerLostError: {error}. This wait cannot be ended; the process ends", file=sys.stderr, flush=True)
            os._exit(1)


def _read(connection: socket.socket) -> bytes:
    """All that comes before the connection is closed."""
    message = b""
    with suppress(OSError):  # such as that of a host that does not answer any more
        while part := connection.recv(MOST_BYTES):
            message += part
    return message


def watch_peers(connections: Mapping[int, socket.socket]) -> None:
    """Watch, in the current world, the ranks at the other ends of `connections`."""
    world = dist.group.WORLD
    assert world is not None, "there are connections in a world alone"
    _watches[world] = PeerWatch(world, connections)


def peer_watch() -> PeerWatch | None:
    """The watch of the current world; None where the backend itself raises errors."""
    world = dist.group.WORLD
    return None if world is None else _watches.get(world)


_watches: WeakKeyDictionary[dist.ProcessGroup, PeerWatch] = WeakKeyDictionary()


def _close_in_child() -> None:
    """Close what a forked process has got, such as a worker that loads data: it may outlive this one."""
    for watch in _watches.values():
        watch.close()


os.register_at_fork(after_in_child=_close_in_child)
