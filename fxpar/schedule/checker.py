"""Prove, before anything is launched, that the programs of all ranks match and terminate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from fxpar.errors import InvalidScheduleError
from fxpar.progress.phases import as_phase
from fxpar.schedule.action import Action
from fxpar.schedule.completion import Clock
from fxpar.schedule.instruction import Complete, Compute, Free, Instruction, PostReceive, Reduce, Send, Wait
from fxpar.schedule.message import Messages
from fxpar.schedule.program import Program
from fxpar.schedule.schedule import Schedule, marked
from fxpar.schedule.transfer import Edge, Routes, Transfer


@as_phase
def check_programs(
    programs: Sequence[Program], schedule: Schedule, edges: Sequence[Edge], messages: Messages | None = None
) -> None:
    """Match every receive with its send, then run the programs abstractly until all have ended.

    A wait blocks until its message was sent and every rank that passes it on to this one has posted its receive.
    Nothing else blocks, and none of these conditions ever becomes false again, so the outcome holds under any timing.
    Vector clocks (Fidge; Mattern) prove that completions, too, are right under any timing: what this rank has waited
    for must imply that all receivers have waited.

    Args:
        messages: what the stages' graphs and the resharding plans expect of every message, which is compared; without
            them, nothing is compared.

    Raises InvalidScheduleError at the first instruction that has no counterpart on another rank, or a different one,
    computes out of the schedule's order, or uses what is not there, and if there is a deadlock.
    """
    assert [program.rank for program in programs] == list(range(len(schedule.ranks))), "one program per rank"
    routes = Routes(edges, schedule.placement)
    _check_matches(programs, routes)
    if messages is not None:
        _check_messages(programs, schedule, edges, messages)
    machines = [_Machine(program, schedule.ranks[program.rank], routes, len(programs)) for program in programs]
    network = _Network(routes)
    while sum(machine.run(network) for machine in machines):
        pass
    if stuck := [machine.blocked(network) for machine in machines if not machine.has_ended]:
        raise InvalidScheduleError(
            f"{schedule.name}: deadlock: these ranks wait for each other\n  " + "\n  ".join(stuck)
        )
    for machine in machines:
        machine.check_end()


def _check_messages(programs: Sequence[Program], schedule: Schedule, edges: Sequence[Edge], messages: Messages) -> None:
    """Raise unless sender, receiver and resharding plan agree on every message."""
    problems = messages.problems(edges)
    for program in programs if problems else ():
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Send | Wait):
                transfer = instruction.transfer
                sends = isinstance(instruction, Send)
                ends = (transfer.source,) if sends else _on_rank(transfer.targets, program.rank, schedule)
                for end in ends:
                    if problem := problems.get((transfer.edge, transfer.source, end)):
                        raise _wrong(program, position, problem)


def _on_rank(stages: Iterable[int], rank: int, schedule: Schedule) -> Iterable[int]:
    return (stage for stage in stages if schedule.placement[stage] == rank)


def _check_matches(programs: Sequence[Program], routes: Routes) -> None:
    """Between two ranks, the n-th receive posted takes the n-th message sent: both must be of the same transfer."""
    sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    posts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for program in programs:
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Send | PostReceive):
                transfer = instruction.transfer
                is_send = isinstance(instruction, Send)
                source, targets = routes.source_rank(transfer), routes.target_ranks(transfer)
                if program.rank not in ((source,) if is_send else targets):
                    raise _wrong(program, position, "is not this rank's to do")
                for target in targets if is_send else (program.rank,):
                    (sends if is_send else posts)[source, target].append(position)
    for source, target in sorted(sends.keys() | posts.keys()):
        _check_pair(programs[source], programs[target], sends[source, target], posts[source, target])


def _check_pair(sender: Program, receiver: Program, sends: Sequence[int], posts: Sequence[int]) -> None:
    for send, post in zip_longest(sends, posts):
        if send is None:
            raise _wrong(receiver, post, "has no matching send")
        if post is None:
            raise _wrong(sender, send, "has no matching receive")
        if (message := _transfer(sender, send)) != _transfer(receiver, post):
            raise _wrong(receiver, post, f"would take what rank {sender.rank} sends as {message}")


def _transfer(program: Program, position: int) -> Transfer:
    instruction = program.instructions[position]
    assert isinstance(instruction, Send | PostReceive)
    return instruction.transfer


@dataclass(frozen=True, slots=True)
class _Network:
    """What the ranks have done so far that others may wait for.

    sent: the messages that were sent, each with the vector clock of its sender at that time.
    posted: receives, with their ranks.
    waited: the positions of waits, by message and rank.
    """

    routes: Routes
    sent: dict[Transfer, Clock] = field(default_factory=dict)
    posted: set[tuple[Transfer, int]] = field(default_factory=set)
    waited: dict[tuple[Transfer, int], int] = field(default_factory=dict)

    def reaches(self, transfer: Transfer, rank: int) -> bool:
        """Whether `transfer` was sent, and all ranks that pass it on to `rank` have posted their receives."""
        return transfer in self.sent and not self.idle_before(transfer, rank)

    def idle_before(self, transfer: Transfer, rank: int) -> list[int]:
        """The ranks that pass `transfer` on to `rank` but have not posted their own receives."""
        ranks = self.routes.target_ranks(transfer)
        return [before for before in ranks[: ranks.index(rank)] if (transfer, before) not in self.posted]

    def unproved(self, transfer: Transfer, clock: Clock) -> list[int]:
        """The ranks that may not have waited for `transfer` yet, as far as a rank with this `clock` knows."""
        ranks = self.routes.target_ranks(transfer)
        return [rank for rank in ranks if self.waited.get((transfer, rank), clock[rank]) >= clock[rank]]


class _Machine:
    """One rank in abstract execution: its position in the program, and the state of its messages and actions."""

    def __init__(self, program: Program, actions: Sequence[Action], routes: Routes, num_ranks: int) -> None:
        self._program = program
        self._position = 0
        self._clock: Clock = np.zeros(num_ranks, np.int64)
        self._routes = routes
        self._actions = actions
        self._to_compute = list(reversed(actions))
        self._posted: set[Transfer] = set()
        self._arrived: set[Transfer] = set()
        self._to_send: set[Transfer] = set()
        self._sent: set[Transfer] = set()
        self._to_free: set[Action] = set()
        self._to_reduce = {action.stage for action in actions if action.kind in ("B", "W")}

    @property
    def has_ended(self) -> bool:
        return self._position == len(self._program.instructions)

    def blocked(self, network: _Network) -> str:
        """Describe the wait at which this rank blocks: its action, and who does not pass the message on, if sent."""
        located = _located(self._program, self._position)
        instruction = self._program.instructions[self._position]
        assert isinstance(instruction, Wait), f"{located} cannot block"
        actions = f"\n    {marked(self._actions, len(self._actions) - len(self._to_compute))}"
        if instruction.transfer not in network.sent:
            return located + actions
        idle = ", ".join(map(str, network.idle_before(instruction.transfer, self._program.rank)))
        return f"{located}, which is not passed on before its receive is posted on rank {idle}{actions}"

    def run(self, network: _Network) -> int:
        """Run to the end, or to a wait for a message that cannot have arrived; returns the number of steps."""
        start = self._position
        while not self.has_ended:
            instruction = self._program.instructions[self._position]
            if self._must_wait(instruction, network):
                break
            self._clock[self._program.rank] = self._position + 1
            if problem := self._step(instruction, network):
                raise _wrong(self._program, self._position, problem)
            self._position += 1
        return self._position - start

    def _must_wait(self, instruction: Instruction, network: _Network) -> bool:
        if not isinstance(instruction, Wait):
            return False
        transfer = instruction.transfer
        return transfer in self._posted and not network.reaches(transfer, self._program.rank)

    def _step(self, instruction: Instruction, network: _Network) -> str | None:
        """Execute `instruction`; returns what is wrong with it, or None."""
        match instruction:
            case PostReceive(transfer):
                self._posted.add(transfer)
                network.posted.add((transfer, self._program.rank))
            case Wait(transfer):
                if transfer not in self._posted:
                    is_early = self._routes.stays(transfer) and transfer not in self._arrived
                    return "comes before what the same rank makes" if is_early else "has no receive posted"
                self._posted.remove(transfer)
                self._arrived.add(transfer)
                network.waited[transfer, self._program.rank] = self._position
                np.maximum(self._clock, network.sent[transfer], out=self._clock)
            case Compute(action):
                return self._compute(action)
            case Send(transfer):
                if transfer not in self._to_send:
                    return "has nothing to send: no computation made it, or it is sent already"
                self._to_send.remove(transfer)
                self._sent.add(transfer)
                network.sent[transfer] = self._clock.copy()
            case Complete(transfer):
                if transfer not in self._sent:
                    return "has nothing to complete: it was not sent, or is completed already"
                if unproved := network.unproved(transfer, self._clock):
                    return f"is not proved: rank {', '.join(map(str, unproved))} may not have waited for it yet"
                self._sent.remove(transfer)
            case Reduce(stage):
                if stage not in self._to_reduce:
                    return "has nothing to reduce: the stage has no gradients here, or they are reduced already"
                if any(action.stage == stage for action in self._to_compute):
                    return "comes before the last action of the stage"
                self._to_reduce.remove(stage)
            case Free(action):
                if action not in self._to_free:
                    return "has nothing to free: it was not computed, or it is freed already"
                if unsent := self._to_send.intersection(self._routes.sent(action)):
                    return f"comes before send {min(map(str, unsent))}"
                self._to_free.remove(action)
        return None

    def _compute(self, action: Action) -> str | None:
        expected = self._to_compute.pop() if self._to_compute else "the end"
        if action != expected:
            return f"is out of order: the schedule has {expected} here"
        needed = self._routes.received(action)
        for transfer in needed:
            if transfer not in self._arrived:
                return f"needs {transfer}, for which nothing waited"
        self._to_send.update(self._routes.sent(action))
        self._to_free.add(action)
        return None

    def check_end(self) -> None:
        """Raise InvalidScheduleError for what is not computed, freed or reduced; other omissions show earlier."""
        missing = ("computes", self._to_compute[-1:]), ("frees", self._to_free), ("reduces stage", self._to_reduce)
        for verb, left in missing:
            if left:
                excerpt = marked([*self._program.instructions, "the end"], self._position, separator="\n  ")
                problem = f"rank {self._program.rank} never {verb} {min(map(str, left))}"
                raise InvalidScheduleError(f"{problem}\n  {excerpt}")


def _located(program: Program, position: int) -> str:
    return f"rank {program.rank}, instruction {position}: {program.instructions[position]}"


def _wrong(program: Program, position: int, problem: str) -> InvalidScheduleError:
    excerpt = marked(program.instructions, position, separator="\n  ")
    return InvalidScheduleError(f"{_located(program, position)} {problem}\n  {excerpt}")
