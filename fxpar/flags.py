"""What flags of commands may be; argparse tells users the names of these functions."""

from __future__ import annotations


def count(text: str) -> int:
    """A positive integer.

    Raises ValueError.
    """
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def counts(text: str) -> list[int]:
    """Several, with commas between.

    Raises ValueError.
    """
    return [count(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Several, with commas between."""
    return text.split(",")
