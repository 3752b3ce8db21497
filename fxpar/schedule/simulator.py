"""Predict the timeline of a step by simulating the programs of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from fxpar.errors import InvalidScheduleError
from fxpar.schedule.action import Action
from fxpar.schedule.costs import Costs, Route, TransferCost
from fxpar.schedule.instruction import Compute, PostReceive, Send, Wait
from fxpar.schedule.links import LinkFlow, Links
from fxpar.schedule.program import Program
from fxpar.schedule.timeline import SENDS, WAIT, Span, Timeline
from fxpar.schedule.transfer import Routes, Transfer


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """Simulate the instructions of each pipe rank in order: computations take their time, waits last until arrival.

    Other instructions take no time, and transfers run concurrently. A transfer starts once it is sent, its first
    receiver has posted, and all earlier ones over the same links have ended. It shares its links with transfers over
    other combinations of links, as in `Links`. A multicast arrives on all its ranks at the same time, unless a rank
    that passes it on posts late. Time 0 is the start of the step.

    Raises:
        InvalidScheduleError: there is a deadlock.
        InvalidCostsError: the costs of something are not known.
    """
    simulation = _Simulation(programs, costs)
    simulation.run()
    return Timeline(simulation.spans())


@dataclass(frozen=True, slots=True)
class _RouteInfo:
    """What all transfers of a route have in common."""

    source: int
    targets: tuple[int, ...]
    cost: TransferCost


@dataclass(slots=True)
class _Message:
    """The state of a transfer.

    posted: the ranks that have posted their receive.
    ready_us: for each rank, when it was sent and this rank, and all that pass it on to it, had posted.
    start_us, end_us: when it started, and when it has arrived on all ranks that were ready by then.
    arrivals_us: on each rank.
    blocked: ranks that wait for it.
    """

    posted: set[int] = field(default_factory=set)
    is_sent: bool = False
    ready_us: dict[int, float] = field(default_factory=dict)
    start_us: float | None = None
    end_us: float | None = None
    arrivals_us: dict[int, float] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)


class _Simulation:
    """The positions of ranks in their programs, the messages in flight, and the times at which a rank continues."""

    def __init__(self, programs: Sequence[Program], costs: Costs) -> None:
        self._programs, self._costs = programs, costs
        self._routes = Routes(costs.edges, costs.placement)
        self._route_infos: dict[Route, _RouteInfo] = {}
        self._messages: defaultdict[Transfer, _Message] = defaultdict(_Message)
        self._links = Links(self._end_flow_at)
        self._positions = [0] * len(programs)
        self._waits: dict[int, tuple[Transfer, float]] = {}
        self._spans: list[Span] = []
        # Ranks that continue at the same time do so in the order of their numbers.
        self._events = [(0.0, rank) for rank in range(len(programs))]
        self._flow_ends: list[tuple[float, int, int, LinkFlow]] = []
        self._numbers = count()

    def run(self) -> None:
        """Run all programs to their ends."""
        while self._events or self._flow_ends:
            if self._flow_ends and (not self._events or self._flow_ends[0][0] <= self._events[0][0]):
                self._end_flow(*heappop(self._flow_ends))
                continue
            now, rank = heappop(self._events)
            self._end_wait(rank, now)
            self._advance(rank, now)
        if self._waits:
            blocked = "\n  ".join(self._blocked(rank, transfer) for rank, (transfer, _) in sorted(self._waits.items()))
            raise InvalidScheduleError(f"deadlock: these ranks wait for each other\n  {blocked}")

    def spans(self) -> tuple[Span, ...]:
        """The spans of the simulated step, sorted by rank and time."""
        spans = list(self._spans)
        for transfer, message in self._messages.items():
            way = self._route_info(transfer)
            if message.arrivals_us and message.start_us is not None and way.cost.time_us:
                end_us = max(message.arrivals_us.values())
                spans.append(Span.of_transfer(way.source, SENDS, transfer, message.start_us, end_us))
        return tuple(sorted(spans, key=lambda span: (span.rank, span.begin_us, span.end_us, span.name)))

    def _advance(self, rank: int, now: float) -> None:
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
        """Start `transfer` if it can start, and record which ranks it can reach now."""
        message, way = self._messages[transfer], self._route_info(transfer)
        if not message.is_sent or way.targets[0] not in message.posted:
            return
        if not message.ready_us:
            self._start(transfer, way.cost, now)
        for rank in way.targets:
            if rank not in message.posted:
                break  # nor can it pass the message on
            if rank not in message.ready_us:
                message.ready_us[rank] = now
                self._deliver(message, rank, way.cost)

    def _start(self, transfer: Transfer, cost: TransferCost, now: float) -> None:
        message = self._messages[transfer]
        if any(cost.busy_us.values()):
            self._note_start(self._links.add(transfer, cost.busy_us, now), now)
        else:
            message.start_us, message.end_us = now, now + cost.time_us

    def _note_start(self, flow: LinkFlow | None, now: float) -> None:
        if flow is not None:
            self._messages[flow.transfer].start_us = now

    def _end_flow_at(self, end_us: float, flow: LinkFlow) -> None:
        heappush(self._flow_ends, (end_us, next(self._numbers), flow.version, flow))

    def _end_flow(self, now: float, _: int, version: int, flow: LinkFlow) -> None:
        """End a transfer on its links, unless its rate has changed since this end was predicted."""
        if version != flow.version:
            return
        message, cost = self._messages[flow.transfer], self._route_info(flow.transfer).cost
        message.end_us = now + cost.time_us - max(cost.busy_us.values())
        for rank in message.ready_us:
            self._deliver(message, rank, cost)
        self._note_start(self._links.end(flow, now), now)

    def _deliver(self, message: _Message, rank: int, cost: TransferCost) -> None:
        """Set the time at which a message arrives on a rank that is ready for it, and wake the rank if it waits."""
        if message.end_us is None:
            return
        message.arrivals_us[rank] = max(message.end_us, message.ready_us[rank] + cost.time_us)
        if rank in message.blocked:
            heappush(self._events, (message.arrivals_us[rank], rank))

    def _route_info(self, transfer: Transfer) -> _RouteInfo:
        route = transfer.edge, transfer.source, transfer.targets
        way = self._route_infos.get(route)
        if way is None:
            routes = self._routes
            cost = self._costs.transfer(transfer, stays=routes.stays(transfer))
            way = self._route_infos[route] = _RouteInfo(
                routes.source_rank(transfer), routes.target_ranks(transfer), cost
            )
        return way

    def _blocked(self, rank: int, transfer: Transfer) -> str:
        """Describe what `rank` would compute next, and why it cannot."""
        following = self._programs[rank].instructions[self._positions[rank] :]
        wanted = next((str(found.action) for found in following if isinstance(found, Compute)), "the end")
        if self._messages[transfer].is_sent:
            idle = next(to for to in self._route_info(transfer).targets if to not in self._messages[transfer].posted)
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
