"""Compute once, on the first rank that asks, what would be the same on all ranks; the others get the result."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fxpar._torch.distributed import PrefixStore, Store, world_store
from fxpar.progress.display import is_showing, say
from fxpar.progress.phases import current_phases, watching

T = TypeVar("T")

_CLAIMS, _ANSWER, _PHASES = "claims", "answer", "phases"
_NO_ANSWER = b""
_PERIOD = timedelta(seconds=0.25)


def compute_once(
    question: str,
    derive: Callable[[], T],
    encode: Callable[[T], bytes | None] = pickle.dumps,
    decode: Callable[[bytes], T] = pickle.loads,
) -> T:
    """The result of `derive`, which only the first rank that asks the same `question` calls, for all ranks.

    This is not a collective: ranks may ask in any order, and not all need to ask. If `derive` fails on the first rank,
    or takes longer than the timeout of the world's store, each other rank calls it itself (and fails the same).

    Args:
        question: everything that the answer depends on.
        derive: returns the answer.
        encode, decode: the answer as bytes, and back. Without bytes, each rank derives the answer itself.
    """
    store = world_store()
    if store is None:
        return derive()
    store = PrefixStore(f"fxpar/once/{hashlib.sha256(question.encode()).hexdigest()}", store)
    if store.add(_CLAIMS, 1) > 1:
        found = _answer_of_first(store)
        return derive() if found == _NO_ANSWER else decode(found)
    told: bytes | None = None
    try:
        with watching(_PhasesForOthers(store)):
            answer = derive()
        told = encode(answer)
    finally:
        store.set(_ANSWER, told or _NO_ANSWER)  # type: ignore[arg-type]  # bytes are as good, and are what `get` returns
    return answer


class _PhasesForOthers:
    """Puts the phases that this rank is in into the store, some times per second, for a rank that shows them."""

    def __init__(self, store: Store) -> None:
        self._store, self._told_at, self._outer = store, time.monotonic(), len(current_phases())

    def __call__(self, phases: tuple[str, ...]) -> None:
        """See `Watch`."""
        if time.monotonic() > self._told_at + _PERIOD.total_seconds():
            self._told_at = time.monotonic()
            self._store.set(_PHASES, ", ".join(phases[self._outer :]))


def _show_phases_of_first(store: Store) -> None:
    """Show what the first rank does until its answer is there, or the store's timeout has passed."""
    deadline = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]  # its stub lacks it
    while time.monotonic() < deadline:
        try:
            store.wait([_ANSWER], _PERIOD)
            return
        except RuntimeError:  # by which stores of several kinds tell that it is not there yet
            doing = store.get(_PHASES).decode() if store.check([_PHASES]) else "waiting"
            say(f"on another rank: {doing}")


def _answer_of_first(store: Store) -> bytes:
    try:
        if is_showing():
            _show_phases_of_first(store)
        found: bytes = store.get(_ANSWER)
        return found
    except dist.DistStoreError:
        return _NO_ANSWER
