"""Choose the sending host and the time of each transfer of a resharding (Zhuang et al., section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fxpar.core.search import SEARCHES, find_bound, find_slots
from fxpar.errors import UnknownAlgorithmError

ALGORITHMS = SEARCHES
"""The paper's four algorithms, and `best`, which combines the last two.

- `naive`: in the given order, each from its lowest sender
- `balance`: the longest first, from the sender that sends least so far
- `depth_first`: branch and bound over order and senders
- `greedy`: whenever an interface becomes free, the best of many random maximal sets of transfers starts
- `best`: greedy, then depth-first search for something better unless a lower bound is reached
"""


@dataclass(frozen=True, slots=True)
class Flow:
    """A transfer, for the search: one of `senders` sends `num_bytes` to all of `receivers`.

    Both are hosts, all different. Receivers form a chain in their order: each forwards to the next what it receives. A
    flow without receivers stays inside its host, and takes no time.
    """

    num_bytes: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    def __post_init__(self) -> None:
        hosts = self.senders + self.receivers
        assert self.num_bytes >= 0 and self.senders and len(set(hosts)) == len(hosts), f"not a flow: {self}"


@dataclass(frozen=True, slots=True)
class Slot:
    """When a flow runs, in bytes at the rate of a host's interface, and which host sends it."""

    sender: int
    start: int
    end: int


def search(flows: Sequence[Flow], algorithm: str = "best", *, seed: int = 0) -> tuple[Slot, ...]:
    """Choose sender and time of every flow; one slot per flow, in the order of `flows`.

    A flow occupies the sending interface of its sender and of all receivers but the last, and the receiving interface
    of every receiver; flows that share one do not overlap. The result is the same on every machine, since the search is
    limited by a number of steps, not by time. 16,384 flows are too many for depth-first search.

    Args:
        algorithm: one of ALGORITHMS.
        seed: of the random numbers of `greedy` and `best`.

    Raises:
        UnknownAlgorithmError: no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise UnknownAlgorithmError(algorithm, ALGORITHMS)
    sizes, senders, receivers = flow_columns(flows)
    chosen, starts = find_slots(sizes, senders, receivers, search=algorithm, seed=seed)
    ends = (start + flow.num_bytes * bool(flow.receivers) for start, flow in zip(starts, flows, strict=True))
    return tuple(map(Slot, chosen, starts, ends))


def makespan(slots: Iterable[Slot]) -> int:
    """When the last flow ends, in bytes at the rate of a host's interface."""
    return max((slot.end for slot in slots), default=0)


def flow_columns(flows: Sequence[Flow]) -> tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The flows' sizes, senders and receivers, as arguments of the native core."""
    return [flow.num_bytes for flow in flows], [flow.senders for flow in flows], [flow.receivers for flow in flows]


def lower_bound(flows: Sequence[Flow]) -> Fraction:
    """The lower bound of the makespan, in bytes at the rate of a host's interface.

    The greater of two numbers. The first is the most bytes that one host must receive. The second is the maximum, over
    all sets of hosts, of the bytes that only they can send, divided by their number. The second is computed exactly, as
    a parametric maximum flow: it is what the most loaded host sends if flows are split as finely as needed and balanced
    best. It holds for every strategy, since it does not count what receivers forward: other hosts could forward that.
    """
    return find_bound(*flow_columns(flows))
