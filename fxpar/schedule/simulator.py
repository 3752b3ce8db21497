"""Predict when everything in a step happens, by running the programs of all ranks on a clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fxpar.errors import InvalidScheduleError
from fxpar.schedule.action import Action
from fxpar.schedule.costs import Costs, Route, TransferCost
from fxpar.schedule.instruction import Compute, PostReceive, Send, Wait
from fxpar.schedule.program import Program
from fxpar.schedule.timeline import SENDS, WAIT, Span, Timeline
from fxpar.schedule.transfer import Routes, Transfer


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """Run the instructions of each pipe rank in order: computations take their time, waits last until arrival.

    All else takes no time and goes on beside them. A transfer starts once it is sent, its first receiver has posted,
    and each link that it takes has moved all that asked for it earlier; links take what was asked for first. All
    ranks of a multicast have it after the same time, unless one that is to pass it on posts late.
    Time 0 is the start of the step.

    Raises:
        InvalidScheduleError: ranks wait for each other.
        InvalidCostsError: the costs of something are not known.
    """
    simulation = _Simulation(programs, costs)
    simulation.run()
    return Timeline(simulation.spans())


@dataclass(frozen=True, slots=True)
class _Way:
    """What all transfers of a route have in common."""

    source: int
    targets: tuple[int, ...]
    cost: TransferCost


@dataclass(slots=True)
class _Message:
    """A transfer: who has posted it, when it left, when it arrives on each rank, and who blocks on it unsent."""

    posted: set[int] = field(default_factory=set)
    is_sent: bool = False
    start_us: float | None = None
    arrivals_us: dict[int, float] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)


class _Simulation:
    """Ranks at their instructions, messages under way, and the points of time at which a rank goes on."""

    def __init__(self, programs: Sequence[Program], costs: Costs) -> None:
        self._programs, self._costs = programs, costs
        self._routes = Routes(costs.edges, costs.placement)
        self._ways: dict[Route, _Way] = {}
        self._messages: defaultdict[Transfer, _Message] = defaultdict(_Message)
        self._link_free_us: defaultdict[str, float] = defaultdict(float)
        self._positions = [0] * len(programs)
        self._waits: dict[int, tuple[Transfer, float]] = {}
        self._spans: list[Span] = []
        # Those that go on at the same time do so in the order of their numbers.
        self._events = [(0.0, rank) for rank in range(len(programs))]

    def run(self) -> None:
        """Run all programs to their ends."""
        while self._events:
            now, rank = heappop(self._events)
            self._end_wait(rank, now)
            self._go_on(rank, now)
        if self._waits:
            blocked = "\n  ".join(self._blocked(rank, transfer) for rank, (transfer, _) in sorted(self._waits.items()))
            raise InvalidScheduleError(f"deadlock: these ranks wait for each other\n  {blocked}")

    def spans(self) -> tuple[Span, ...]:
        """What has happened, rank by rank and in the order of time."""
        spans = list(self._spans)
        for transfer, message in self._messages.items():
            way = self._way(transfer)
            if message.start_us is not None and way.cost.time_us:
                end_us = max(message.arrivals_us.values())
                spans.append(Span.of_transfer(way.source, SENDS, transfer, message.start_us, end_us))
        return tuple(sorted(spans, key=lambda span: (span.rank, span.begin_us, span.end_us, span.name)))

    def _go_on(self, rank: int, now: float) -> None:
        """Run instructions of `rank` until one takes time."""
        instructions = self._programs[rank].instructions
        while (position := self._positions[rank]) < len(instructions):
            self._positions[rank] += 1
            match instructions[position]:
                case Compute(action):
                    self._compute(rank, action, now)
                    return
                case Wait(transfer):
                    if not self._has_arrived(rank, transfer, now):
                        return
                case PostReceive(transfer):
                    self._messages[transfer].posted.add(rank)
                    self._progress(transfer, now)
                case Send(transfer):
                    self._messages[transfer].is_sent = True
                    self._progress(transfer, now)

    def _compute(self, rank: int, action: Action, now: float) -> None:
        end_us = now + self._costs.action_us(action.stage, action.kind)
        self._spans.append(Span.of_action(rank, action, now, end_us))
        heappush(self._events, (end_us, rank))

    def _has_arrived(self, rank: int, transfer: Transfer, now: float) -> bool:
        """Whether `rank` need not wait; if it must, an event ends that once the arrival is known."""
        message = self._messages[transfer]
        arrival_us = message.arrivals_us.get(rank)
        if arrival_us is not None and arrival_us <= now:
            return True
        self._waits[rank] = transfer, now
        if arrival_us is None:
            message.blocked.add(rank)
        else:
            heappush(self._events, (arrival_us, rank))
        return False

    def _end_wait(self, rank: int, now: float) -> None:
        if rank in self._waits:
            transfer, begin_us = self._waits.pop(rank)
            if now > begin_us:
                self._spans.append(Span.of_transfer(rank, WAIT, transfer, begin_us, now))

    def _progress(self, transfer: Transfer, now: float) -> None:
        """Start `transfer` if it can, and find out when it arrives where it is awaited."""
        message, way = self._messages[transfer], self._way(transfer)
        if not message.is_sent or way.targets[0] not in message.posted:
            return
        if message.start_us is None:
            message.start_us = self._take_links(way.cost.busy_us, now)
        for rank in way.targets:
            if rank not in message.posted:
                break  # nor does it pass anything on
            if rank not in message.arrivals_us:
                message.arrivals_us[rank] = max(message.start_us, now) + way.cost.time_us
                if rank in message.blocked:
                    heappush(self._events, (message.arrivals_us[rank], rank))

    def _take_links(self, busy_us: Mapping[str, float], now: float) -> float:
        """When all these links are free; they are taken from then on."""
        start_us = max([now, *(self._link_free_us[link] for link in busy_us)])
        for link, time_us in busy_us.items():
            self._link_free_us[link] = start_us + time_us
        return start_us

    def _way(self, transfer: Transfer) -> _Way:
        route = transfer.edge, transfer.source, transfer.targets
        way = self._ways.get(route)
        if way is None:
            routes = self._routes
            cost = self._costs.transfer(transfer, stays=routes.stays(transfer))
            way = self._ways[route] = _Way(routes.source_rank(transfer), routes.target_ranks(transfer), cost)
        return way

    def _blocked(self, rank: int, transfer: Transfer) -> str:
        """What `rank` wants to compute, and why it cannot."""
        following = self._programs[rank].instructions[self._positions[rank] :]
        wanted = next((str(found.action) for found in following if isinstance(found, Compute)), "the end")
        if self._messages[transfer].is_sent:
            idle = next(to for to in self._way(transfer).targets if to not in self._messages[transfer].posted)
            return f"rank {rank}: {wanted} waits for {transfer}, whose receive rank {idle} has not posted"
        return f"rank {rank}: {wanted} waits for {transfer}, which {self._maker(transfer)} makes"

    def _maker(self, transfer: Transfer) -> str:
        maker = "nothing"
        for instruction in self._programs[self._routes.source_rank(transfer)].instructions:
            if isinstance(instruction, Compute):
                maker = str(instruction.action)
            elif instruction == Send(transfer):
                return maker
        return "nothing"
