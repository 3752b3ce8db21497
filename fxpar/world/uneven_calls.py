"""Notice that ranks make different calls: with arguments of different shapes, or one evaluates where another trains.

All ranks compile a step together, and run it together. One whose last batch has fewer rows than those of the others,
or that evaluates alone, would wait for them in vain, and they for it: no error comes before the timeout of a
collective, half an hour by default. So a rank writes into the store of the world what it is about to compile, and
where another rank is in a step for long, a thread of that one looks there. If the step is the same one, or a later
one, neither can go on. Nothing can end the wait within a step over gloo, so the process ends with a message, and the
rank that compiles, which misses it, raises an error. Ranks that are both in a step for long compare what they run in
the same way.

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
_ANNOUNCED, _RUNNING = "announced", "running"


@dataclass(frozen=True, slots=True)
class _Call:
    """What a rank runs, or is about to compile, and how many steps it has begun."""

    steps: int
    rank: int
    what: str


@dataclass(frozen=True, slots=True)
class _Compile(_Call):
    """What a rank is about to compile; `number` counts its compiles, this one included."""

    number: int


class CallWatch:
    """Watches the steps of one distributed model, of which `name` is the same on all ranks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps = self._compiles = 0
        self._since: float | None = None
        self._what = ""

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """The context of a step; `what` says whether it trains, and for arguments of which shapes."""
        if self._steps == 0 and self._store() is not None:
            threading.Thread(target=_look_often, args=[weakref.ref(self)], name="uneven calls", daemon=True).start()
        self._steps += 1
        self._what, self._since = what, time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """The context in which a rank waits for all others to compile a step, too.

        Raises:
            UnevenCallsError: another rank ran a step that it had compiled before, and has ended.
        """
        store = self._store()
        if store is None:
            yield
            return
        self._compiles += 1
        own = _Compile(self._steps, dist.get_rank(), what, self._compiles)
        store.set(_ANNOUNCED, json.dumps(asdict(own)))
        try:
            yield
        except PeerLostError:
            with suppress(RuntimeError):  # the store may have been that rank's
                if store.check([_refusal(own)]):
                    rank, theirs = json.loads(store.get(_refusal(own)))
                    raise UnevenCallsError(f"this rank is to compile {what}", rank, theirs) from None
            raise

    def look(self) -> None:
        """End this process if it runs a step that another rank does not run: one that compiles, or runs another."""
        since, steps = self._since, self._steps
        if since is None or time.monotonic() < since + LONG_S or (store := self._store()) is None:
            return
        own = _Call(steps, dist.get_rank(), self._what)
        other = self._call_of_another(store, own)
        store.set(_RUNNING, json.dumps(asdict(own)))
        if other is None or time.monotonic() < since + LONG_S + GRACE_S:
            return
        if self._since is not None and self._steps == steps:
            does = "runs"
            if isinstance(other, _Compile):
                does = "is to compile"
                store.set(_refusal(other), json.dumps([own.rank, own.what]))
            error = UnevenCallsError(f"rank {other.rank} {does} {other.what}", own.rank, own.what)
            message = f"UnevenCallsError: {error}. This wait cannot be ended; the process ends"
            print(message, file=sys.stderr, flush=True)
            os._exit(1)

    def _call_of_another(self, store: Store, own: _Call) -> _Call | None:
        """What another rank compiles or runs in the place of this step; None if nothing is known of one."""
        if store.check([_ANNOUNCED]):
            compiled = _Compile(**json.loads(store.get(_ANNOUNCED)))
            if compiled.number > self._compiles and compiled.steps < own.steps:
                return compiled
        if store.check([_RUNNING]):
            running = _Call(**json.loads(store.get(_RUNNING)))
            if running.steps == own.steps and running.what != own.what:
                return running
        return None

    def _store(self) -> Store | None:
        store = world_store()
        return None if store is None or peer_watch() is not None else PrefixStore(f"fxpar/calls/{self._name}", store)


def _refusal(refused: _Compile) -> str:
    return f"refused {refused.number}"


def _look_often(watch: weakref.ref[CallWatch]) -> None:
    while True:
        time.sleep(min(_PERIOD_S, LONG_S))
        if (own := watch()) is None:
            return
        with suppress(RuntimeError):  # the world, and so its store, may have ended
            own.look()
        del own
