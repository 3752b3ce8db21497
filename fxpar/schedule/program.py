"""Programs: a schedule with its communication, as one flat list of instructions per pipe rank.

For each action there are, in this order: waits for what it needs, posted receives for later actions, the action, its
sends, and a free. A wait is followed by the completion of each send whose arrival it proves. So only `Wait` can block.
A stage's gradients are reduced after its last action.

A multicast has one send, on its source, and a receive and a wait on each target's rank. That rank passes it on to the
next one concurrently with its own program, once its receive is posted. What stays on a rank is sent and received
there, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxpar.schedule.action import Action
from fxpar.schedule.completion import insert_completions
from fxpar.schedule.instruction import Compute, Free, Instruction, PostReceive, Reduce, Send, Wait
from fxpar.schedule.schedule import Schedule, peak_in_flight
from fxpar.schedule.transfer import Edge, Routes, Transfer


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one pipe rank in a step; prints as one instruction per line."""

    rank: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.instructions))


def lower(schedule: Schedule, edges: Sequence[Edge], lookahead: int | None = None) -> tuple[Program, ...]:
    """The program of every pipe rank, given the edges between the stages.

    `lookahead` is how many receives of one edge from one stage may be posted and not yet waited for. By
    default it is one more than the microbatches in flight on the rank, so that buffers grow only with their
    number; with 0, a receive is posted right before its wait.
    """
    routes = Routes(edges, schedule.placement)
    queues = _queues(schedule, routes)
    lookaheads = [peak + 1 if lookahead is None else lookahead for peak in peak_in_flight(schedule)]
    programs = [
        _lower_rank(actions, routes, _Inbox(queues[rank], lookaheads[rank]))
        for rank, actions in enumerate(schedule.ranks)
    ]
    completed = insert_completions(programs, routes)
    return tuple(Program(rank, tuple(instructions)) for rank, instructions in enumerate(completed))


def _lower_rank(actions: Sequence[Action], routes: Routes, inbox: _Inbox) -> list[Instruction]:
    program: list[Instruction] = [PostReceive(transfer) for transfer in inbox.post_ahead()]
    last_of = {action.stage: action for action in actions}
    for action in actions:
        needed = routes.received(action)
        program.extend(PostReceive(transfer) for wanted in needed for transfer in inbox.post_until(wanted))
        program.extend(Wait(transfer) for transfer in needed if inbox.wait_for(transfer))
        program.extend(PostReceive(transfer) for transfer in inbox.post_ahead())
        program.append(Compute(action))
        for transfer in routes.sent(action):
            if routes.stays(transfer):
                program.append(inbox.post_own(transfer))
            program.append(Send(transfer))
        program.append(Free(action))
        if action.kind in ("B", "W") and last_of[action.stage] == action:
            program.append(Reduce(action.stage))
    return program


def _queues(schedule: Schedule, routes: Routes) -> list[defaultdict[int, deque[Transfer]]]:
    """For every rank, the transfers from each other rank to it, in the order of the sends."""
    queues: list[defaultdict[int, deque[Transfer]]] = [defaultdict(deque) for _ in schedule.ranks]
    for source, actions in enumerate(schedule.ranks):
        for action in actions:
            for transfer in routes.sent(action):
                for target in routes.target_ranks(transfer):
                    if target != source:
                        queues[target][source].append(transfer)
    return queues


class _Inbox:
    """The receives of one rank; each sender's are posted in the order of its sends, so that they match."""

    def __init__(self, queues: Mapping[int, deque[Transfer]], lookahead: int) -> None:
        self._queues = queues
        self._senders = {transfer: rank for rank, queue in queues.items() for transfer in queue}
        self._lookahead = lookahead
        self._posted: set[Transfer] = set()
        self._arrived: set[Transfer] = set()
        self._outstanding: Counter[tuple[str, int]] = Counter()

    def post_ahead(self) -> Iterator[Transfer]:
        """Post the receives that the lookahead permits."""
        for queue in self._queues.values():
            while queue and self._outstanding[queue[0].edge, queue[0].source] < self._lookahead:
                yield self._post(queue)

    def post_until(self, wanted: Transfer) -> Iterator[Transfer]:
        """Post `wanted` and all before it, whatever the lookahead, because an action needs it now."""
        while wanted in self._senders and wanted not in self._posted:
            yield self._post(self._queues[self._senders[wanted]])

    def post_own(self, transfer: Transfer) -> PostReceive:
        """Post the receive of what this rank is about to send to itself."""
        self._outstanding[transfer.edge, transfer.source] += 1
        return PostReceive(transfer)

    def wait_for(self, transfer: Transfer) -> bool:
        """Whether it must be waited for: not if another stage of this rank has waited already."""
        if transfer in self._arrived:
            return False
        self._arrived.add(transfer)
        self._outstanding[transfer.edge, transfer.source] -= 1
        return True

    def _post(self, queue: deque[Transfer]) -> Transfer:
        transfer = queue.popleft()
        self._posted.add(transfer)
        self._outstanding[transfer.edge, transfer.source] += 1
        return transfer
