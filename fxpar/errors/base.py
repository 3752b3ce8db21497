"""What all errors share."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class FxparError(Exception):
    """Base of every error that fxpar raises on purpose."""


def some_of(names: Sequence[str], shown: int = 5) -> str:
    """The first few of the names, and how many others there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def one_of(expected: Sequence[str], found: str) -> str:
    """Says which names were expected, and which of them `found` resembles."""
    close = get_close_matches(found, expected, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(map(repr, expected)) or '(nothing)'}{hint}"
