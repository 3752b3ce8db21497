"""The order in which ranks of one host use its network interface: one after another, as in the resharding plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from fxpar.resharding.plan import ReshardPlan


@dataclass(frozen=True)
class SendOrder:
    """By relay number, the relay that must have arrived `before` it, except for its last `ahead_bytes`.

    Relays that wait for none are left out.
    """

    before: Mapping[int, int]
    ahead_bytes: int = 0

    @classmethod
    def of(cls, plan: ReshardPlan) -> SendOrder:
        """The order of each host's sends in the plan, where it sends to several peers or from several ranks."""
        sequences: dict[int, list[int]] = {}
        for number, relay in enumerate(plan.relays):
            if relay.num_hops:
                sequences.setdefault(plan.hosts[relay.path[0]], []).append(number)
        ahead = plan.network.ahead_bytes
        several = [numbers for numbers in sequences.values() if len({plan.relays[n].path[:2] for n in numbers}) > 1]
        return cls({k: v for numbers in several for k, v in _before(plan, numbers, ahead)}, ahead)

    @cached_property
    def _after(self) -> Mapping[int, list[int]]:
        after: dict[int, list[int]] = {}
        for later, earlier in self.before.items():
            after.setdefault(earlier, []).append(later)
        return after

    def after(self, number: int) -> Sequence[int]:
        """The relays that wait for relay `number`."""
        return self._after.get(number, ())

    def concern(self, number: int) -> bool:
        """Whether relay `number` waits for another relay, or another relay waits for it."""
        return number in self.before or number in self._after

    def bytes_until_next(self, number: int, num_bytes: int) -> int | None:
        """How many bytes of a relay must have arrived before the next may be sent; None if no relay waits for it."""
        if number not in self._after:
            return None
        return num_bytes - self.ahead_bytes if num_bytes > self.ahead_bytes else num_bytes


def _before(plan: ReshardPlan, numbers: Sequence[int], ahead: int) -> Iterator[tuple[int, int]]:
    """Each relay of a host's sequence, and the one to wait for.

    That is the last one before it that is longer than `ahead` bytes, or that ends at least `ahead` bytes before its
    start.
    """
    sizes = [plan.relays[number].num_elements * plan.itemsize for number in numbers]
    ends = list(accumulate(sizes))
    last = -1
    for place in range(1, len(numbers)):
        far = bisect_right(ends, ends[place - 1] - ahead) - 1
        last = max(last, far, place - 1 if sizes[place - 1] > ahead else -1)
        if last >= 0:
            yield numbers[place], numbers[last]
