"""Lowerings: each turns a rank's local ATen graph into a callable.

The symlink fxpar/lowering makes this folder the package fxpar.lowering, its only name in imports.
"""

from fxpar.errors import UnknownLoweringError
from fxpar.lowering.aten import lower_to_aten
from fxpar.lowering.inductor import lower_to_inductor
from fxpar.lowering.lowering import Lowering

_LOWERINGS: dict[str, Lowering] = {"inductor": lower_to_inductor, "aten": lower_to_aten}

__all__ = ["Lowering", "lower"]


def lower(name: str) -> Lowering:
    """The lowering called `name`: one of `fxpar.config.LOWERINGS`.

    Raises:
        UnknownLoweringError
    """
    if name not in _LOWERINGS:
        raise UnknownLoweringError(name, list(_LOWERINGS))
    return _LOWERINGS[name]
