"""Links between hosts, which messages share: how fast each moves, and when it has passed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fxpar.schedule.transfer import Transfer


@dataclass(slots=True)
class Flow:
    """A transfer on its links.

    shares: of each link, the part that it uses at full speed: all of the one that it keeps busy longest.
    remaining_us: from `updated_us` on, at full speed; it moves at `rate` times that.
    version: counts the changes of `rate`, each of which puts off or brings forward its end.
    """

    transfer: Transfer
    shares: Mapping[str, float]
    remaining_us: float
    updated_us: float = 0.0
    rate: float = 0.0
    version: int = 0


class Links:
    """Transfers under way, each over links that it would keep busy for some time if it had them for itself.

    Transfers over the same links go one after another, as messages of one connection do. Others share links fairly, as
    connections do: where together they would use more than all of a link, it slows them all down by the same factor. A
    transfer moves as the slowest of its links lets it. What it does not use of the others is left unused; in a chain of
    stages that is nothing, since whatever slows one of two transfers on a link slows the other as much.

    Args:
        end_at: is told at which time a flow of which version will end, as things are now.
    """

    def __init__(self, end_at: Callable[[float, Flow], None]) -> None:
        self._end_at = end_at
        self._on: defaultdict[str, list[Flow]] = defaultdict(list)
        self._queues: defaultdict[frozenset[str], deque[Flow]] = defaultdict(deque)

    def add(self, transfer: Transfer, busy_us: Mapping[str, float], now: float) -> Flow | None:
        """Let `transfer` pass; returns its flow if it starts at once, not behind another."""
        longest_us = max(busy_us.values())
        flow = Flow(transfer, {link: time_us / longest_us for link, time_us in busy_us.items()}, longest_us)
        queue = self._queues[frozenset(busy_us)]
        queue.append(flow)
        return self._start(flow, now) if queue[0] is flow else None

    def end(self, flow: Flow, now: float) -> Flow | None:
        """Take `flow` off its links at its end; returns the flow behind it, which starts then."""
        for link in flow.shares:
            self._on[link].remove(flow)
        self._update(flow.shares, now)
        queue = self._queues[frozenset(flow.shares)]
        queue.popleft()
        return self._start(queue[0], now) if queue else None

    def _start(self, flow: Flow, now: float) -> Flow:
        flow.updated_us = now
        for link in flow.shares:
            self._on[link].append(flow)
        self._update(flow.shares, now)
        return flow

    def _update(self, links: Iterable[str], now: float) -> None:
        """The rates of all flows on these links, after one has come or gone."""
        for flow in {id(flow): flow for link in links for flow in self._on[link]}.values():
            rate = 1 / max(1.0, *(self._load(link) for link in flow.shares))
            if rate != flow.rate:
                flow.remaining_us -= (now - flow.updated_us) * flow.rate
                flow.rate, flow.updated_us, flow.version = rate, now, flow.version + 1
                self._end_at(now + flow.remaining_us / rate, flow)

    def _load(self, link: str) -> float:
        return sum(flow.shares[link] for flow in self._on[link])
