"""Sizes by the names of the settings that have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard


def is_size(value: object) -> TypeGuard[int]:
    """Whether the value of a setting is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def size_for(name: str, sizes: Mapping[str, int]) -> int | None:
    """The size of the first pattern that is the whole name; None if there is none."""
    return next((size for pattern, size in sizes.items() if re.fullmatch(pattern, name)), None)
