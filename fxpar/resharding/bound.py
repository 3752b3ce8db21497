"""What no schedule of a resharding's transfers can undercut (Zhuang et al., section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from fxpar.core.search import find_bound
from fxpar.resharding.search import Flow, flow_columns


def lower_bound(flows: Sequence[Flow]) -> Fraction:
    """The least makespan to hope for, in bytes at the rate of a host's interface.

    The greater of two: the most that one host must receive; and, over all sets of hosts, what only they can send,
    divided by their number. The latter is exact for any number of sets: it is what the most loaded host sends when
    flows are cut as finely as needed and balanced best, found as a parametric maximum flow. It bounds every way to
    send, since what receivers send on is not counted: others could do that.
    """
    return find_bound(*flow_columns(flows))
