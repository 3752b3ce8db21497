"""Warnings of derivations, which are given again where a result is not derived but found."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_PACKAGE = str(Path(__file__).parents[1])


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """A context that adds the texts of fxpar's own warnings to the list that it returns; they are shown as ever."""
    texts: list[str] = []
    show = warnings.showwarning

    def record(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename.startswith(_PACKAGE):
            texts.append(str(message))
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = record
    try:
        yield texts
    finally:
        warnings.showwarning = show


def give(texts: Iterable[str]) -> None:
    """Give the warnings that a derivation gave."""
    for text in texts:
        warnings.warn(text, stacklevel=2)
