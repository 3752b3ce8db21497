"""What users are told when Dynamo gives up on a forward."""

from __future__ import annotations

import re
from types import FunctionType

from fxpar._torch.compiler import failed_trace
from fxpar._torch.dynamo.stand_ins import READS_STAND_IN
from fxpar.errors import (
    DataDependentShapeError,
    ForwardRaisesError,
    FxparError,
    GraphBreakError,
    RandomGeneratorError,
    UnavailableTensorError,
)

_RAISED = re.compile(r"raised exception (.+)")
"""In Dynamo's reason, if the code that it traced raises, and does not catch it."""

_READS_KEPT = re.compile(rf"{READS_STAND_IN}\s+Explanation: (.+)")


_SHAPE_OF_DATA = re.compile(r"`(aten\.[\w.]+)`'s output shape depends on input Tensor data")


def error_of_failed_trace(function: FunctionType) -> FxparError | None:
    """The error that tells why Dynamo did not trace `function`; None if it traced it, or was never asked to."""
    failure = failed_trace(function)
    if failure is None:
        return None
    reason, where = failure
    if raised := _RAISED.search(reason):
        return ForwardRaisesError(raised[1], where)
    return error_of_graph_break(reason, where)


def error_of_graph_break(reason: str, where: str) -> FxparError:
    """The error for Dynamo's reason to end a graph at a line."""
    if "UserDefinedObjectVariable(Generator)" in reason:
        return RandomGeneratorError(where)
    if kept := _READS_KEPT.search(reason):
        return UnavailableTensorError(kept[1])
    if selecting := _SHAPE_OF_DATA.search(reason):
        return DataDependentShapeError(selecting[1], where)
    return GraphBreakError(_first_paragraph(reason), where)


def _first_paragraph(reason: str) -> str:
    """Dynamo's reason on one line, without what follows: its own debugging hints."""
    explanation, _, _ = reason.partition("\n\n")
    return " ".join(explanation.split())
