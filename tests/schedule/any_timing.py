"""Run programs under a random timing, with nothing taken on trust: what a checker that accepts them promises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

from fxpar.schedule import (
    Action,
    Complete,
    Compute,
    Edge,
    Free,
    Instruction,
    PostReceive,
    Program,
    Reduce,
    Routes,
    Schedule,
    Send,
    Transfer,
    Wait,
)


class TimedRun:
    """Ranks and messages that go on in any order that the instructions leave them.

    `run` raises AssertionError for what goes wrong, and returns whether all ranks came to their ends.
    """

    def __init__(self, programs: Sequence[Program], schedule: Schedule, edges: Sequence[Edge], seed: int) -> None:
        self._programs, self._schedule = programs, schedule
        self._routes = Routes(edges, schedule.placement)
        self._random = Random(seed)
        self._at = [0] * len(programs)
        self._sent: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self._posted: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self._arrived: set[tuple[int, Transfer]] = set()
        self._waited: set[tuple[int, Transfer]] = set()
        self._done: list[Action] = []
        self._freed: set[Action] = set()
        self._reduced: list[int] = []

    def run(self) -> bool:
        while events := [*self._ready_ranks(), *self._ready_messages()]:
            event = self._random.choice(events)
            if isinstance(event, int):
                self._step(event, self._programs[event].instructions[self._at[event]])
                self._at[event] += 1
            else:
                self._arrived.add(event)
        if any(at < len(program.instructions) for at, program in zip(self._at, self._programs, strict=True)):
            return False
        wanted = [action for actions in self._schedule.ranks for action in actions]
        assert sorted(map(str, self._done)) == sorted(map(str, wanted)), "every action has run, once"
        assert self._freed == set(wanted), "all is freed"
        return True

    def _ready_ranks(self) -> list[int]:
        return [rank for rank in range(len(self._programs)) if self._can_go_on(rank)]

    def _can_go_on(self, rank: int) -> bool:
        instructions = self._programs[rank].instructions
        if self._at[rank] == len(instructions):
            return False
        instruction = instructions[self._at[rank]]
        return not isinstance(instruction, Wait) or (rank, instruction.transfer) in self._arrived

    def _ready_messages(self) -> list[tuple[int, Transfer]]:
        """Sent, to be received, passed on by all ranks before, and not there yet."""
        return [
            (target, transfer)
            for (_, target), transfers in self._sent.items()
            for transfer in transfers
            if (target, transfer) not in self._arrived and self._is_passed_on(transfer, target)
        ]

    def _is_passed_on(self, transfer: Transfer, target: int) -> bool:
        ranks = self._routes.target_ranks(transfer)
        source = self._routes.source_rank(transfer)
        return all(transfer in self._posted[source, rank] for rank in ranks[: ranks.index(target) + 1])

    def _step(self, rank: int, instruction: Instruction) -> None:
        match instruction:
            case PostReceive(transfer):
                pair = self._routes.source_rank(transfer), rank
                self._posted[pair].append(transfer)
                self._check_matches(*pair)
            case Send(transfer):
                maker = self._maker(transfer)
                assert maker in self._done and maker not in self._freed, f"{instruction}: there is nothing to send"
                for target in self._routes.target_ranks(transfer):
                    pair = rank, target
                    self._sent[pair].append(transfer)
                    self._check_matches(*pair)
            case Wait(transfer):
                self._waited.add((rank, transfer))
            case Compute(action):
                self._compute(rank, action)
            case Complete(transfer):
                early = [r for r in self._routes.target_ranks(transfer) if (r, transfer) not in self._waited]
                assert not early, f"{instruction}: ranks {early} do not have it"
            case Reduce(stage):
                self._reduced.append(stage)
            case Free(action):
                assert action in self._done and action not in self._freed, f"{instruction}: there is nothing to free"
                self._freed.add(action)

    def _check_matches(self, source: int, target: int) -> None:
        for sent, posted in zip(self._sent[source, target], self._posted[source, target], strict=False):
            assert sent == posted, f"rank {target} takes {sent} for {posted}"

    def _compute(self, rank: int, action: Action) -> None:
        assert self._schedule.placement[action.stage] == rank
        assert action.stage not in self._reduced or action.kind in ("F", "I"), f"{action}: reduced already"
        for transfer in self._routes.received(action):
            assert (rank, transfer) in self._waited, f"{action}: {transfer} is not there"
        before = {"I": "F", "B": "F", "W": "I"}.get(action.kind)
        done = {str(action) for action in self._done}
        assert before is None or f"{action.stage}{before}{action.microbatch}" in done, f"{action} is too early"
        self._done.append(action)

    def _maker(self, transfer: Transfer) -> Action:
        (maker,) = (
            action
            for action in self._schedule.ranks[self._routes.source_rank(transfer)]
            if transfer in self._routes.sent(action)
        )
        return maker


class QueuedRun(TimedRun):
    """Over groups, as NCCL has them: what one rank sends to the same others is a queue on each of them.

    A message arrives when all its receivers have come to it, and all that was sent before it in its queue is there.
    """

    def _ready_messages(self) -> list[tuple[int, Transfer]]:
        sent: dict[Transfer, int] = {}
        for (source, _), transfers in self._sent.items():
            sent |= dict.fromkeys(transfers, source)
        queues: defaultdict[tuple[int, tuple[int, ...]], list[Transfer]] = defaultdict(list)
        for transfer, source in sent.items():
            queues[source, self._routes.target_ranks(transfer)].append(transfer)
        ready = []
        for (source, targets), transfers in queues.items():
            missing = [t for t in transfers if any((target, t) not in self._arrived for target in targets)]
            if missing and all(missing[0] in self._posted[source, target] for target in targets):
                ready += [(target, missing[0]) for target in targets if (target, missing[0]) not in self._arrived]
        return ready
