"""Types of command-line flags; argparse shows the names of these functions to users."""

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
    """Comma-separated positive integers.

    Raises ValueError.
    """
    return [count(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Comma-separated names."""
    return text.split(",")
