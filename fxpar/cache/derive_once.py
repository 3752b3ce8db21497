"""Derive once, on any rank of any launch, what would be the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
    folder = own_cache() if on_disk else None
    if folder is not None and (known := folder.get(question)) is not None:
        try:
            found: T = decode(known)
        except NotEncodableError:
            pass  # an entry that another program wrote
        else:
            return found
    decoded: Callable[[bytes], T] = decode
    encoded: bytes | None = None

    def derive_and_keep() -> T:
        nonlocal encoded
        answer = derive()
        encoded = _encoded(answer)
        if folder is not None and encoded is not None:
            folder.put(question, encoded)
        return answer

    return compute_once(question, derive_and_keep, lambda _: encoded, decoded)


def _encoded(answer: object) -> bytes | None:
    try:
        return encode(answer)
    except NotEncodableError:
        return None
