"""What users are told when Dynamo gives up on a forward before there is any graph."""

from __future__ import annotations

import re
from types import FunctionType

from fxpar._torch.compiler import failed_trace
from fxpar.errors import ForwardRaisesError, FxparError, GraphBreakError

_RAISED = re.compile(r"raised exception (.+)")
"""In Dynamo's reason, if the code that it traced raises, and does not catch it."""


def error_of_failed_trace(function: FunctionType) -> FxparError | None:
    """The error that tells why Dynamo did not trace `function`; None if it traced it, or was never asked to."""
    failure = failed_trace(function)
    if failure is None:
        return None
    reason, where = failure
    if raised := _RAISED.search(reason):
        return ForwardRaisesError(raised[1], where)
    return GraphBreakError(first_paragraph(reason), where)


def first_paragraph(reason: str) -> str:
    """Dynamo's reason on one line, without what follows: its own debugging hints."""
    explanation, _, _ = reason.partition("\n\n")
    return " ".join(explanation.split())
