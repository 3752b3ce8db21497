"""Programs: a schedule with its communication, as one flat list of instructions per pipe rank.

Around each action stand, in this order: the waits for what it needs, receives posted for later actions, the
action, its sends, and a free. Nothing waits for a send before the step ends, so only `Wait` can block.

A multicast has one send, on its source, and a receive and a wait on each target. A target passes it on to the next
beside its own program, once its receive is posted.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxpar.schedule.action import Action
from fxpar.schedule.schedule import Schedule, peak_in_flight
from fxpar.schedule.transfer import Edge, Routes, Transfer


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Begin to receive, and to pass on what later targets need of it.

    Messages between two ranks match in the order in which they are posted and sent.
    """

    transfer: Transfer

    def __str__(self) -> str:
        return f"post {self.transfer}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Block until the posted receive has arrived."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"wait {self.transfer}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a stage's graph on what was waited for."""

    action: Action

    def __str__(self) -> str:
        return f"compute {self.action}"


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send what the last compute made; completed when the step ends."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True, slots=True)
class Free:
    """Forget what the action received and sent and, if no other will use it, what was saved for backward."""

    action: Action

    def __str__(self) -> str:
        return f"free {self.action}"


Instruction: TypeAlias = PostReceive | Wait | Compute | Send | Free


@dataclass(frozen=True, slots=True)
class Program:
    """What one pipe rank does in a step; prints as one instruction per line."""

    rank: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.instructions))


def lower(schedule: Schedule, edges: Sequence[Edge], lookahead: int | None = None) -> tuple[Program, ...]:
    """The program of every pipe rank, given the edges between the stages.

    `lookahead` is how many receives of one edge from one stage may be posted and not yet waited for. By
    default it is one more than the microbatches in flight on the rank, so that buffers grow only with what
    is in flight; with 0, a receive is posted right before its wait.
    """
    routes = Routes(edges)
    queues = _queues(schedule, routes)
    lookaheads = [peak + 1 if lookahead is None else lookahead for peak in peak_in_flight(schedule)]
    return tuple(
        Program(rank, _lower_rank(actions, routes, _Inbox(queues[rank], lookaheads[rank])))
        for rank, actions in enumerate(schedule.ranks)
    )


def _lower_rank(actions: Sequence[Action], routes: Routes, inbox: _Inbox) -> tuple[Instruction, ...]:
    program: list[Instruction] = [PostReceive(transfer) for transfer in inbox.post_ahead()]
    for action in actions:
        needed = routes.received(action)
        program.extend(PostReceive(transfer) for wanted in needed for transfer in inbox.post_until(wanted))
        for transfer in needed:
            program.append(Wait(transfer))
            inbox.waited_for(transfer)
        program.extend(PostReceive(transfer) for transfer in inbox.post_ahead())
        program.append(Compute(action))
        program.extend(Send(transfer) for transfer in routes.sent(action))
        program.append(Free(action))
    return tuple(program)


def _queues(schedule: Schedule, routes: Routes) -> list[defaultdict[int, deque[Transfer]]]:
    """For every rank, what each other rank sends to it, in the order of the sends."""
    queues: list[defaultdict[int, deque[Transfer]]] = [defaultdict(deque) for _ in schedule.ranks]
    for source, actions in enumerate(schedule.ranks):
        for action in actions:
            for transfer in routes.sent(action):
                for target in transfer.targets:
                    queues[target][source].append(transfer)
    return queues


class _Inbox:
    """The receives of one rank; each sender's are posted in the order of its sends, so that they match."""

    def __init__(self, queues: Mapping[int, deque[Transfer]], lookahead: int) -> None:
        self._queues = queues
        self._lookahead = lookahead
        self._posted: set[Transfer] = set()
        self._outstanding: Counter[tuple[str, int]] = Counter()

    def post_ahead(self) -> Iterator[Transfer]:
        """Post what the lookahead permits."""
        for queue in self._queues.values():
            while queue and self._outstanding[queue[0].edge, queue[0].source] < self._lookahead:
                yield self._post(queue)

    def post_until(self, wanted: Transfer) -> Iterator[Transfer]:
        """Post `wanted` and all before it, whatever the lookahead, because an action needs it now."""
        while wanted not in self._posted:
            yield self._post(self._queues[wanted.source])

    def waited_for(self, transfer: Transfer) -> None:
        self._outstanding[transfer.edge, transfer.source] -= 1

    def _post(self, queue: deque[Transfer]) -> Transfer:
        transfer = queue.popleft()
        self._posted.add(transfer)
        self._outstanding[transfer.edge, transfer.source] += 1
        return transfer
