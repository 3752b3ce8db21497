"""What stands where an earlier forward kept a tensor; a forward may replace it, but not read it."""

import functools

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder

READS_STAND_IN = "The forward reads a tensor that an earlier one kept"
"""How Dynamo's reason for a graph to end begins where a stand-in is read; its explanation is the line that keeps it."""


class StandIn:
    """Stands for a tensor that the forward stores on an object, and that no rank has whole.

    kept_at: the source line that stores it; no method of tensors has this name.
    """

    kept_at: str


@functools.cache
def refuse_reads_of_stand_ins() -> None:
    """Let Dynamo break the graph where it would trace a stand-in as an object without values or as no tensor."""
    build = VariableBuilder.__call__

    def __call__(self: VariableBuilder, value: object) -> VariableTracker:
        if isinstance(value, StandIn):
            unimplemented(gb_type=READS_STAND_IN, context="", explanation=value.kept_at, hints=[])
        return build(self, value)

    VariableBuilder.__call__ = __call__  # type: ignore[method-assign]
