"""Changes that a forward makes in place to what outlives it: parameters, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpar.ir.stage import Port


@dataclass(frozen=True, slots=True)
class Change:
    """`module` (ATen) returns the new value of the tensor at `port` from the values of those at `reads`.

    line: where the forward changes it, for messages.
    is_pointwise: whether it does so element by element, so that it may be computed of pieces.
    """

    port: Port
    reads: tuple[Port, ...]
    module: fx.GraphModule
    line: str
    is_pointwise: bool
