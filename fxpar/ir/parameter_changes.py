"""Changes that a forward makes to parameters themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """`module` (pointwise ATen) returns the new value of the parameter `name` from the values of those in `reads`.

    line: where the forward changes it, for messages.
    """

    name: str
    reads: tuple[str, ...]
    module: fx.GraphModule
    line: str
