"""Find where a rank can know that what it sent has arrived, so that its memory is freed before the step ends."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fxpar.schedule.instruction import Complete, Instruction, Send, Wait
from fxpar.schedule.transfer import Routes, Transfer

Clock = npt.NDArray[np.int64]
"""How many instructions of each rank are known to be done: a vector clock."""


def insert_completions(programs: Sequence[Sequence[Instruction]], routes: Routes) -> list[list[Instruction]]:
    """The same programs with a `Complete` after each wait that proves that all receivers of a send have waited for it.

    A message implies all that its sender knew when it sent it: its own progress, and that of other ranks. Deadlocks
    are left as they are, for the checker to find.
    """
    observers = [_Observer(rank, instructions, routes, len(programs)) for rank, instructions in enumerate(programs)]
    waited_at = {
        (instruction.transfer, rank): position
        for rank, instructions in enumerate(programs)
        for position, instruction in enumerate(instructions)
        if isinstance(instruction, Wait)
    }
    sent: dict[Transfer, Clock] = {}
    while sum(observer.run(sent, waited_at) for observer in observers):
        pass
    return [observer.completed() for observer in observers]


class _Observer:
    """A rank that runs its program until it would block, and learns from messages what others have done."""

    def __init__(self, rank: int, instructions: Sequence[Instruction], routes: Routes, num_ranks: int) -> None:
        self._rank, self._instructions, self._routes = rank, instructions, routes
        self._position = 0
        self._clock: Clock = np.zeros(num_ranks, np.int64)
        self._under_way: defaultdict[tuple[str, int, tuple[int, ...]], deque[Transfer]] = defaultdict(deque)
        self._output: list[Instruction] = []

    def run(self, sent: dict[Transfer, Clock], waited_at: dict[tuple[Transfer, int], int]) -> bool:
        """Run to the end, or to a wait for what was not sent yet; returns whether there was any progress."""
        start = self._position
        while self._position < len(self._instructions):
            instruction = self._instructions[self._position]
            if isinstance(instruction, Wait) and instruction.transfer not in sent:
                break
            self._position += 1
            self._clock[self._rank] = self._position
            self._output.append(instruction)
            if isinstance(instruction, Send):
                transfer = instruction.transfer
                sent[transfer] = self._clock.copy()
                self._under_way[transfer.edge, transfer.source, transfer.targets].append(transfer)
            elif isinstance(instruction, Wait):
                np.maximum(self._clock, sent[instruction.transfer], out=self._clock)
                self._complete(waited_at)
        return self._position > start

    def completed(self) -> list[Instruction]:
        """The program with its completions."""
        return [*self._output, *self._instructions[self._position :]]

    def _complete(self, waited_at: dict[tuple[Transfer, int], int]) -> None:
        for transfers in self._under_way.values():
            while transfers and self._has_arrived(transfers[0], waited_at):
                self._output.append(Complete(transfers.popleft()))

    def _has_arrived(self, transfer: Transfer, waited_at: dict[tuple[Transfer, int], int]) -> bool:
        ranks = self._routes.target_ranks(transfer)
        return all((transfer, rank) in waited_at and waited_at[transfer, rank] < self._clock[rank] for rank in ranks)
