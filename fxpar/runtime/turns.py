"""Whose turn it is to use a host's interface: ranks of one host send one after another, as their plan says."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fxpar.reshard.plan import Relay, ReshardPlan

AHEAD_BYTES = 1 << 19
"""How much of what a host sends may be under way, so that its interface is busy while the news of arrivals travels."""


@dataclass(frozen=True, slots=True)
class Turns:
    """For relays by their number in the plan, the one that must have arrived before, at least but for `AHEAD_BYTES`.

    Relays that nothing keeps waiting have none.
    """

    before: Mapping[int, int]

    @classmethod
    def of(cls, plan: ReshardPlan) -> Turns:
        """By the order in which each host sends."""
        sequences: dict[int, list[int]] = {}
        for number, relay in enumerate(plan.relays):
            if relay.num_hops:
                sequences.setdefault(plan.hosts[relay.path[0]], []).append(number)
        return cls({k: v for numbers in sequences.values() for k, v in _before(plan, numbers)})

    def after(self, number: int) -> list[int]:
        """The relays that wait for relay `number`."""
        return [later for later, earlier in self.before.items() if earlier == number]


def _before(plan: ReshardPlan, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each relay of a host's sequence with the last one that ends `AHEAD_BYTES` before it starts, or the long one."""
    sizes = [plan.relays[number].num_elements * plan.itemsize for number in numbers]
    ends = list(accumulate(sizes))
    for place in range(1, len(numbers)):
        if sizes[place - 1] > AHEAD_BYTES:
            yield numbers[place], numbers[place - 1]
        elif (count := bisect_right(ends, ends[place - 1] - AHEAD_BYTES)) > 0:
            yield numbers[place], numbers[count - 1]


def turn_bytes(relay: Relay, itemsize: int) -> int:
    """How many bytes of a relay have arrived when the next may have its turn."""
    num_bytes = relay.num_elements * itemsize
    return num_bytes - AHEAD_BYTES if num_bytes > AHEAD_BYTES else num_bytes
