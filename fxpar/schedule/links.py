"""Links between hosts, which messages share: the rate of each message, and when it ends."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fxpar.schedule.transfer import Transfer


@dataclass(slots=True)
class LinkFlow:
    """A transfer on its links.

    shares: the fraction of each link that it uses at full speed: 1 for the link that it keeps busy longest.
    remaining_us: the time left from `updated_us` on, at full speed; the actual speed is `rate` times that.
    version: counts the changes of `rate`, each of which changes its end.
    """

    transfer: Transfer
    shares: Mapping[str, float]
    remaining_us: float
    updated_us: float = 0.0
    rate: float = 0.0
    version: int = 0


class Links:
    """Transfers in progress, each over links that it would keep busy for some time if it had them for itself.

    Transfers over the same links run one after another, as messages of one connection do. Others share links fairly, as
    connections do: if together they would need more than the whole of a link, all are slowed down by the same factor. A
    transfer has the rate of the slowest of its links. What it does not use of the others is left unused; in a chain of
    stages that is nothing, since whatever slows one of two transfers on a link slows the other as much.

    Args:
        end_at: called with the time at which a flow will end at the present rates, whenever that changes.
    """

    def __init__(self, end_at: Callable[[float, LinkFlow], None]) -> None:
        self._end_at = end_at
        self._on: defaultdict[str, list[LinkFlow]] = defaultdict(list)
        self._queues: defaultdict[frozenset[str], deque[LinkFlow]] = defaultdict(deque)

    def add(self, transfer: Transfer, busy_us: Mapping[str, float], now: float) -> LinkFlow | None:
        """Add `transfer`; returns its flow if it starts at once, and None if it is queued behind another."""
        longest_us = max(busy_us.values())
        flow = LinkFlow(transfer, {link: time_us / longest_us for link, time_us in busy_us.items()}, longest_us)
        queue = self._queues[frozenset(busy_us)]
        queue.append(flow)
        return self._start(flow, now) if queue[0] is flow else None

    def end(self, flow: LinkFlow, now: float) -> LinkFlow | None:
        """Remove `flow` at its end; returns the next flow of its queue, which starts then."""
        for link in flow.shares:
            self._on[link].remove(flow)
        self._update(flow.shares, now)
        queue = self._queues[frozenset(flow.shares)]
        queue.popleft()
        return self._start(queue[0], now) if queue else None

    def _start(self, flow: LinkFlow, now: float) -> LinkFlow:
        flow.updated_us = now
        for link in flow.shares:
            self._on[link].append(flow)
        self._update(flow.shares, now)
        return flow

    def _update(self, links: Iterable[str], now: float) -> None:
        """Update the rates of all flows on these links, after one was added or removed."""
        for flow in {id(flow): flow for link in links for flow in self._on[link]}.values():
            rate = 1 / max(1.0, *(self._load(link) for link in flow.shares))
            if rate != flow.rate:
                flow.remaining_us -= (now - flow.updated_us) * flow.rate
                flow.rate, flow.updated_us, flow.version = rate, now, flow.version + 1
                self._end_at(now + flow.remaining_us / rate, flow)

    def _load(self, link: str) -> float:
        return sum(flow.shares[link] for flow in self._on[link])
