"""A lower bound of the makespan of a resharding's transfers (Zhuang et al., section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from fxpar.core.search import find_bound
from fxpar.resharding.search import Flow, flow_columns


def lower_bound(flows: Sequence[Flow]) -> Fraction:
    """The lower bound of the makespan, in bytes at the rate of a host's interface.

    The greater of two numbers. The first is the most bytes that one host must receive. The second is the maximum, over
    all sets of hosts, of the bytes that only they can send, divided by their number. The second is computed exactly, as
    a parametric maximum flow: it is what the most loaded host sends if flows are split as finely as needed and balanced
    best. It holds for every strategy, since it does not count what receivers forward: other hosts could forward that.
    """
    return find_bound(*flow_columns(flows))
