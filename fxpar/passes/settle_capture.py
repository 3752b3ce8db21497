"""What is done to a captured forward before it is cut into stages."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from fxpar.ir.capture import Capture
from fxpar.model.distribution import Distribution
from fxpar.passes.keep_all_rows import keep_all_rows
from fxpar.passes.total_over_batch import total_over_batch

_settled: WeakKeyDictionary[Capture, Capture | None] = WeakKeyDictionary()
"""What became of captures, None for those that stay as they are: a plan and several steps are made from each."""


def settle_capture(capture: Capture, distribution: Distribution) -> Capture:
    """The capture with known shapes, and with numbers of the whole batch as inputs.

    Raises: as `keep_all_rows`.
    """
    if capture not in _settled:
        found = total_over_batch(keep_all_rows(capture), distribution)
        _settled[capture] = None if found is capture else found
    return _settled[capture] or capture
