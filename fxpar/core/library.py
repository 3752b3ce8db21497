"""The native core's shared library, and its functions."""

from __future__ import annotations

from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import Any

from fxpar.errors import CoreNotBuiltError

LIBRARY = Path(__file__).parents[1] / "libfxpar.so"


def function(name: str, result: Any, *parameters: Any, library: Path = LIBRARY) -> Any:
    """The C function `name`, with its ctypes types as in csrc/fxpar.h (result None: void).

    Raises:
        CoreNotBuiltError: the library is missing, cannot be loaded, or lacks the function.
    """
    try:
        found = getattr(_load(library), name)
    except (OSError, AttributeError) as error:
        raise CoreNotBuiltError(str(library), str(error)) from error
    found.restype = result
    found.argtypes = parameters
    return found


@cache
def _load(library: Path) -> CDLL:
    return CDLL(str(library))
