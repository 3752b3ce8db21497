"""Notice that one rank compiles a step while another runs one: they were called with arguments of different shapes.

All ranks compile a step together. One whose last batch has fewer rows than those of the others would wait for them in
vain, and they for it: no error comes before the timeout of a collective, half an hour by default. So a rank writes into
the store of the world what it is about to compile, and where another rank is in a step for long, a thread of that one
looks there. If the step is the same one, or a later one, neither can go on. Nothing can end the wait within a step over
gloo, so the process ends with a message, and the rank that compiles, which misses it, raises an error.

Over NCCL the watch of peers ends waits, but it does not see this.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from fxpar._torch.distributed import PrefixStore, Store, world_store
from fxpar.errors import PeerLostError, UnevenCallsError
from fxpar.world.peer_watch import peer_watch

LONG_S = 10.0
"""After how long in one step a rank looks whether another one compiles; steps of large models take seconds."""

GRACE_S = 20.0
"""How long that step may still take to end, since a rank may be that much behind another one."""

_PERIOD_S = 2.0
_ANNOUNCED = "announced"


@dataclass(frozen=True, slots=True)
class _Compile:
    """What a rank announces: its number of compiles, this one included, and of steps, and the shapes of arguments."""

    number: int
    steps: int
    rank: int
    arguments: str


class CallWatch:
    """Watches the steps of one distributed model, of which `name` is the same on all ranks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps = self._compiles = 0
        self._since: float | None = None
        self._arguments = ""

    @contextmanager
    def running(self, arguments: str) -> Iterator[None]:
        """The context of a step, for arguments of these shapes."""
        if self._steps == 0 and self._store() is not None:
            threading.Thread(target=_look_often, args=[weakref.ref(self)], name="uneven calls", daemon=True).start()
        self._steps += 1
        self._arguments, self._since = arguments, time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @contextmanager
    def compiling(self, arguments: str) -> Iterator[None]:
        """The context in which a rank waits for all others to compile a step, too.

        Raises:
            UnevenCallsError: another rank ran a step that it had compiled before, and has ended.
        """
        store = self._store()
        if store is None:
            yield
            return
        self._compiles += 1
        own = _Compile(self._compiles, self._steps, dist.get_rank(), arguments)
        store.set(_ANNOUNCED, json.dumps(asdict(own)))
        try:
            yield
        except PeerLostError:
            with suppress(RuntimeError):  # the store may have been that rank's
                if store.check([_refusal(own)]):
                    rank, theirs = json.loads(store.get(_refusal(own)))
                    raise UnevenCallsError(arguments, rank, theirs) from None
            raise

    def look(self) -> None:
        """End this process if it runs a step that another rank, which compiles, does not run."""
        since, number = self._since, self._steps
        if since is None or time.monotonic() < since + LONG_S or (store := self._store()) is None:
            return
        if not store.check([_ANNOUNCED]):
            return
        other = _Compile(**json.loads(store.get(_ANNOUNCED)))
        if other.number <= self._compiles or other.steps >= number or time.monotonic() < since + LONG_S + GRACE_S:
            return
        if self._since is not None and self._steps == number:
            store.set(_refusal(other), json.dumps([dist.get_rank(), self._arguments]))
            error = UnevenCallsError(other.arguments, dist.get_rank(), self._arguments, compiling=other.rank)
            print(
                f"UnevenCallsError: {error}. This wait cannot be ended; the process ends", file=sys.stderr, flush=True
            )
            os._exit(1)

    def _store(self) -> Store | None:
        store = world_store()
        return None if store is None or peer_watch() is not None else PrefixStore(f"fxpar/calls/{self._name}", store)


def _refusal(compile: _Compile) -> str:
    return f"refused {compile.number}"


def _look_often(watch: weakref.ref[CallWatch]) -> None:
    while True:
        time.sleep(min(_PERIOD_S, LONG_S))
        if (own := watch()) is None:
            return
        with suppress(RuntimeError):  # the world, and so its store, may have ended
            own.look()
        del own
