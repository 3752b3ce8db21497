"""Compute once, on the first rank that asks, what would be the same on all ranks; the others get the result."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fxpar._torch.distributed import PrefixStore, Store, world_store

T = TypeVar("T")

_CLAIMS, _ANSWER = "claims", "answer"
_NO_ANSWER = b""


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
        answer = derive()
        told = encode(answer)
    finally:
        store.set(_ANSWER, told or _NO_ANSWER)  # type: ignore[arg-type]  # bytes are as good, and are what `get` returns
    return answer


def _answer_of_first(store: Store) -> bytes:
    try:
        found: bytes = store.get(_ANSWER)
        return found
    except dist.DistStoreError:
        return _NO_ANSWER
