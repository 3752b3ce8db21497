"""Find consecutive repeats in a sequence, such as the layers of a model in the list of its graph's ops."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch import fx


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` equal pieces of `period` items each, one after another from item `start`."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The first item after the last piece."""
        return self.start + self.period * self.count


def find_repeats(labels: Sequence[Hashable], prices: Sequence[int], smallest: int) -> list[Repeat]:
    """The repeats of a sequence, in order and disjoint: the one that saves most items, then those in the remainder.

    Args:
        labels: items are equal where their labels are.
        prices: for each position from 0 to len(labels), the cost of a cut before that item: a repeat is placed where
            its cuts cost least.
        smallest: the least number of items in a piece.
    """
    numbers: dict[Hashable, int] = {}
    items = np.asarray([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)
    costs = np.asarray(prices, dtype=np.int64)
    found: list[Repeat] = []
    stretches = [(0, len(items))]
    while stretches:
        start, stop = stretches.pop()
        best = _best_repeat(items[start:stop], costs[start : stop + 1], smallest)
        if best is not None:
            repeat = Repeat(start + best.start, best.period, best.count)
            found.append(repeat)
            stretches += [(start, repeat.start), (repeat.stop, stop)]
    return sorted(found, key=lambda repeat: repeat.start)


def _best_repeat(items: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], smallest: int) -> Repeat | None:
    """The repeat that leaves fewest items to treat; the shortest period among equals."""
    best: Repeat | None = None
    num_saved = 0
    for period in range(smallest, len(items) // 2 + 1):
        same = items[:-period] == items[period:]
        if np.count_nonzero(same) // period * period <= num_saved:
            continue  # an upper bound that rules out most periods
        start, length = _longest_run(same)
        if length // period * period > num_saved:
            num_saved = length // period * period
            best = _lay_cuts(start, start + length + period, period, costs)
    return best


def _longest_run(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Where the longest run of True starts, and its length."""
    borders = np.flatnonzero(np.diff(same, prepend=False, append=False))
    if len(borders) == 0:
        return 0, 0
    starts, lengths = borders[::2], borders[1::2] - borders[::2]
    longest = int(np.argmax(lengths))
    return int(starts[longest]), int(lengths[longest])


def _lay_cuts(start: int, stop: int, period: int, costs: npt.NDArray[np.int64]) -> Repeat:
    """As many pieces as fit between start and stop, where their cuts cost least."""
    count = (stop - start) // period
    starts = range(start, stop - count * period + 1)
    cheapest = min(starts, key=lambda first: int(costs[first : first + count * period + 1 : period].sum()))
    return Repeat(cheapest, period, count)


def count_crossings(calls: Sequence[Sequence[fx.Node]]) -> list[int]:
    """For each position among calls, how many values computed before it are used by calls after it.

    A call is an op and the items of its results.
    """
    place = {node: index for index, call in enumerate(calls) for node in call}
    changes = [0] * (len(calls) + 1)
    for node, index in place.items():
        last = max((place.get(user, index) for user in node.users), default=index)
        if last > index:
            changes[index + 1] += 1
            changes[last + 1] -= 1
    return list(accumulate(changes))
