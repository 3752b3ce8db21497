"""Prove, before anything is launched, that the programs of all ranks fit together and come to an end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from fxpar.errors import InvalidScheduleError
from fxpar.schedule.action import Action
from fxpar.schedule.program import Compute, Free, Instruction, PostReceive, Program, Send, Wait
from fxpar.schedule.schedule import Schedule, marked
from fxpar.schedule.transfer import Edge, Routes, Transfer


def check_programs(programs: Sequence[Program], schedule: Schedule, edges: Sequence[Edge]) -> None:
    """Match every receive with its send, then run the programs abstractly until all have ended.

    Only waits block, and each waits for one message of one rank, so the outcome holds under any timing.
    Raises InvalidScheduleError at the first instruction that has no counterpart on another rank, computes out
    of the schedule's order, or uses what is not there, and where ranks block each other for good.
    """
    assert [program.rank for program in programs] == list(range(schedule.num_stages)), "one program per rank"
    _check_messages(programs)
    routes = Routes(edges)
    machines = [_Machine(program, schedule.ranks[program.rank], routes) for program in programs]
    sent: set[Transfer] = set()
    while sum(machine.run(sent) for machine in machines):
        pass
    if stuck := [machine.here for machine in machines if not machine.has_ended]:
        raise InvalidScheduleError("deadlock: these ranks wait for each other\n  " + "\n  ".join(stuck))
    for machine in machines:
        machine.check_end()


def _check_messages(programs: Sequence[Program]) -> None:
    """Between two ranks, the n-th receive posted takes the n-th message sent: they must be one transfer."""
    sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    posts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for program in programs:
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Send | PostReceive):
                source, target = instruction.transfer.source, instruction.transfer.target
                is_send = isinstance(instruction, Send)
                if program.rank != (source if is_send else target):
                    raise _wrong(program, position, "is not this rank's to do")
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


class _Machine:
    """One rank in abstract execution: the instruction it is at, and what it has at hand there."""

    def __init__(self, program: Program, actions: Sequence[Action], routes: Routes) -> None:
        self._program = program
        self._position = 0
        self._routes = routes
        self._to_compute = list(reversed(actions))
        self._posted: set[Transfer] = set()
        self._arrived: set[Transfer] = set()
        self._to_send: set[Transfer] = set()
        self._to_free: set[Action] = set()

    @property
    def has_ended(self) -> bool:
        return self._position == len(self._program.instructions)

    @property
    def here(self) -> str:
        return _located(self._program, self._position)

    def run(self, sent: set[Transfer]) -> int:
        """Go on to the end or to a wait for what is not in `sent`, adding to it; returns the steps taken."""
        start = self._position
        while not self.has_ended:
            instruction = self._program.instructions[self._position]
            if isinstance(instruction, Wait) and instruction.transfer in self._posted - sent:
                break
            if problem := self._step(instruction, sent):
                raise _wrong(self._program, self._position, problem)
            self._position += 1
        return self._position - start

    def _step(self, instruction: Instruction, sent: set[Transfer]) -> str | None:
        """Execute `instruction`; returns what is wrong with it, if anything is."""
        match instruction:
            case PostReceive(transfer):
                self._posted.add(transfer)
            case Wait(transfer):
                if transfer not in self._posted:
                    return "has no receive posted"
                self._posted.remove(transfer)
                self._arrived.add(transfer)
            case Compute(action):
                return self._compute(action)
            case Send(transfer):
                if transfer not in self._to_send:
                    return "has nothing to send: no computation made it, or it is sent already"
                self._to_send.remove(transfer)
                sent.add(transfer)
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
        self._arrived.difference_update(needed)
        self._to_send.update(self._routes.sent(action))
        self._to_free.add(action)
        return None

    def check_end(self) -> None:
        """Raise InvalidScheduleError for what is not computed or freed; other omissions show earlier."""
        for verb, left in (("computes", self._to_compute[-1:]), ("frees", self._to_free)):
            if left:
                raise InvalidScheduleError(f"rank {self._program.rank} never {verb} {min(map(str, left))}")


def _located(program: Program, position: int) -> str:
    return f"rank {program.rank}, instruction {position}: {program.instructions[position]}"


def _wrong(program: Program, position: int, problem: str) -> InvalidScheduleError:
    excerpt = marked(program.instructions, position, separator="\n  ")
    return InvalidScheduleError(f"{_located(program, position)} {problem}\n  {excerpt}")
