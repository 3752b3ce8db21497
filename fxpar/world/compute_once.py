"""What every rank would derive alike is derived by one of them: by the first that asks."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fxpar._torch import PrefixStore, Store, world_store

T = TypeVar("T")

_CLAIMS, _ANSWER = "claims", "answer"
_NO_ANSWER = b""


def once(question: str, derive: Callable[[], T]) -> T:
    """What `derive` returns to all ranks of the world that ask the same `question`, while only the first derives it.

    This is no collective: ranks may ask in any order, and what only some of them ask. A rank derives for itself what
    the first failed to derive, and so fails alike, or did not within the time that the world's store waits for.

    Args:
        question: all that the answer depends on.
        derive: returns the answer, which can be pickled.
    """
    store = world_store()
    if store is None:
        return derive()
    store = PrefixStore(f"fxpar/once/{hashlib.sha256(question.encode()).hexdigest()}", store)
    if store.add(_CLAIMS, 1) > 1:
        found = _answer_of_first(store)
        return derive() if found == _NO_ANSWER else pickle.loads(found)
    told = _NO_ANSWER
    try:
        answer = derive()
        told = pickle.dumps(answer)
    finally:
        store.set(_ANSWER, told)  # type: ignore[arg-type]  # bytes are as good, and are what `get` returns
    return answer


def _answer_of_first(store: Store) -> bytes:
    try:
        found: bytes = store.get(_ANSWER)
        return found
    except dist.DistStoreError:
        return _NO_ANSWER
