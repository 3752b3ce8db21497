"""Derive once, on any rank of any launch, what would be the same on all of them; answers are never None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fxpar.cache.encode import NotEncodableError, decode, encode
from fxpar.cache.folder import own_cache
from fxpar.world.compute_once import compute_once

T = TypeVar("T")


def derive_once(question: str, derive: Callable[[], T], *, on_disk: bool = True) -> T:
    """The result of `derive`, or an equal one: of an earlier launch from the disk, or of the rank that asked first.

    This is not a collective, see `compute_once`. What cannot be encoded, each rank derives for itself.

    Args:
        question: everything that the result depends on, but for the versions of torch and fxpar.
        derive: returns what `fxpar.cache.encode` can encode.
        on_disk: whether a later launch may use it; if not, the question need only tell apart what ranks of one world
            ask.
    """
    found: T | None = find(question) if on_disk else None
    if found is not None:
        return found
    decoded: Callable[[bytes], T] = decode
    encoded: bytes | None = None

    def derive_and_keep() -> T:
        nonlocal encoded
        answer = derive()
        encoded = _encoded(answer)
        if on_disk and encoded is not None:
            _put(question, encoded)
        return answer

    return compute_once(question, derive_and_keep, lambda _: encoded, decoded)


def find(question: str) -> Any:
    """The answer that an earlier launch kept; None if there is none that is whole."""
    folder = own_cache()
    known = None if folder is None else folder.get(question)
    try:
        return None if known is None else decode(known)
    except NotEncodableError:  # an entry that another program wrote
        return None


def keep(question: str, answer: object) -> None:
    """Keep the answer for later launches, if it can be encoded."""
    if own_cache() is not None and (encoded := _encoded(answer)) is not None:
        _put(question, encoded)


def _put(question: str, encoded: bytes) -> None:
    if (folder := own_cache()) is not None:
        folder.put(question, encoded)


def _encoded(answer: object) -> bytes | None:
    try:
        return encode(answer)
    except NotEncodableError:
        return None
