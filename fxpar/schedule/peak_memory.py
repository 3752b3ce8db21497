"""Walk through programs to find the memory of each, action by action, and its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxpar.schedule.action import Action, Kind
from fxpar.schedule.instruction import Complete, Compute, Free, Instruction, PostReceive, Send
from fxpar.schedule.memory import PARTS, Part, RankMemory, StageMemory
from fxpar.schedule.program import Program
from fxpar.schedule.schedule import Schedule
from fxpar.schedule.transfer import Edge, Routes, Transfer


def peak_memory(
    programs: Sequence[Program], schedule: Schedule, edges: Sequence[Edge], memory: Mapping[int, StageMemory]
) -> tuple[RankMemory, ...]:
    """The peak memory of every rank; exact without timing, since a rank's instructions run one after another.

    A receive allocates its buffer when it is posted, an action its results when it is computed. What is sent is kept
    until its completion, or to the end. What stays on a rank is passed by reference, and has no buffer of its own.

    Not counted: memory that kernels and transports use internally, the buckets in which gradients are reduced after
    the last action, temporaries of the optimizer's step, and fragmentation.

    Args:
        memory: the figures of every stage.
    """
    routes = Routes(edges, schedule.placement)
    return tuple(_Walk(program, schedule, routes, memory).peak() for program in programs)


@dataclass(frozen=True, slots=True)
class ActionMemory:
    """The bytes of a rank by use: while it runs `action`, and once it has freed what only the action needed."""

    action: Action
    running: Mapping[Part, int]
    after: Mapping[Part, int]


def memory_by_action(
    programs: Sequence[Program], schedule: Schedule, edges: Sequence[Edge], memory: Mapping[int, StageMemory]
) -> tuple[tuple[ActionMemory, ...], ...]:
    """The memory of every rank at each of its actions, in order; arguments and what is not counted as `peak_memory`."""
    routes = Routes(edges, schedule.placement)
    return tuple(tuple(_Walk(program, schedule, routes, memory).actions()) for program in programs)


_Key: TypeAlias = tuple[str, int, int, bool]
"""A value or gradient of an edge: edge, microbatch, the stage that made it, and whether it is the gradient."""


@dataclass(slots=True)
class _Storage:
    """Memory of an edge, allocated as long as anything holds it; it counts as saved while something saves it."""

    part: Part
    num_bytes: int
    holders: int = 0
    savers: int = 0

    @property
    def counted_as(self) -> Part:
        return "saved" if self.savers else self.part


class _Walk:
    """The memory of one rank while it runs its program."""

    def __init__(self, program: Program, schedule: Schedule, routes: Routes, memory: Mapping[int, StageMemory]) -> None:
        self._program, self._routes, self._memory = program, routes, memory
        self._has_backward = schedule.has_backward
        self._stages = schedule.stages_of(program.rank)
        self._with_gradients = set[int]()
        self._storages: dict[_Key, _Storage] = {}
        self._totals: Counter[Part] = Counter(dict.fromkeys(PARTS, 0))
        for stage in self._stages:
            self._totals["parameters"] += memory[stage].parameters
            self._totals["optimizer"] += memory[stage].optimizer

    def peak(self) -> RankMemory:
        """Walk through the program."""
        peak = saved_peak = -1
        at, parts = 0, self._totals.copy()
        for position, instruction in enumerate(self._program.instructions):
            self._step(instruction)
            saved_peak = max(saved_peak, self._totals["saved"])
            if (total := self._totals.total()) > peak:
                peak, at, parts = total, position, self._totals.copy()
            self._totals["working"] = 0
        return RankMemory(self._program.rank, peak, saved_peak, at, str(self._program.instructions[at]), parts)

    def actions(self) -> Iterator[ActionMemory]:
        """Walk through the program, and note the memory at each action."""
        running = self._totals.copy()
        for instruction in self._program.instructions:
            self._step(instruction)
            if isinstance(instruction, Compute):
                running = self._totals.copy()
                self._totals["working"] = 0
            elif isinstance(instruction, Free):
                yield ActionMemory(instruction.action, running, self._totals.copy())

    def _step(self, instruction: Instruction) -> None:
        match instruction:
            case PostReceive(transfer):
                self._receive(transfer)
            case Compute(action):
                self._work(action)
                self._compute(action)
            case Send(transfer):
                self._hold(_key(transfer))
            case Complete(transfer):
                self._release(_key(transfer))
            case Free(action):
                self._free(action)

    def _work(self, action: Action) -> None:
        """Count what an action needs while it runs; the first that makes parameter gradients leaves them allocated."""
        memory = self._memory[action.stage]
        working = memory.working.get(action.kind, 0)
        if action.kind in ("B", "W") and action.stage not in self._with_gradients:
            self._with_gradients.add(action.stage)
            self._totals["gradients"] += memory.gradients
            working = max(0, working - memory.terms)
        self._totals["working"] = working

    def _receive(self, transfer: Transfer) -> None:
        readers = [stage for stage in transfer.targets if stage in self._stages]
        if not self._routes.stays(transfer):
            figures = [self._memory[stage] for stage in readers]
            sizes = [(f.gradients_of if transfer.is_backward else f.read).get(transfer.edge, 0) for f in figures]
            self._storages[_key(transfer)] = _Storage("received", max(sizes))
        for _ in readers:
            self._hold(_key(transfer))

    def _compute(self, action: Action) -> None:
        """Allocate what is made, and count what is saved from now on."""
        memory = self._memory[action.stage]
        made = memory.values if action.kind == "F" else memory.returned
        for key in dict.fromkeys(map(_key, self._routes.sent(action))):
            self._storages[key] = _Storage("made", made.get(key[0], 0))
            self._hold(key)
        match action.kind:
            case "F":
                self._totals["results"] += memory.results
                if self._has_backward:
                    self._totals["saved"] += memory.saved_for_inputs + memory.saved_for_weights
                    for key, _ in self._kept(action):
                        self._hold(key, saving=True)
            case "I":
                self._totals["saved"] += memory.carried
                for key in self._carried(action):
                    self._hold(key, saving=True)

    def _free(self, action: Action) -> None:
        """Release what the action received and made, then what was saved until it has run."""
        memory = self._memory[action.stage]
        made = dict.fromkeys(map(_key, self._routes.sent(action)))
        for key in (*map(_key, self._routes.received(action)), *made):
            self._release(key)
        if action.kind == "F":
            return
        self._totals["saved"] -= memory.saved_for_inputs if action.kind in ("B", "I") else 0
        self._totals["saved"] -= memory.saved_for_weights if action.kind in ("B", "W") else 0
        for key, until in self._kept(action):
            if action.kind in ("B", until):
                self._release(key, saving=True)
        if action.kind == "W":
            self._totals["saved"] -= memory.carried
            for key in self._carried(action):
                self._release(key, saving=True)

    def _kept(self, action: Action) -> Iterator[tuple[_Key, Kind]]:
        """Values of edges that the stage saves for the microbatch's backward, and the action that needs each last."""
        memory, forward = self._memory[action.stage], Action(action.stage, "F", action.microbatch)
        if memory.read_until:
            for key in map(_key, self._routes.received(forward)):
                if key[0] in memory.read_until:
                    yield key, memory.read_until[key[0]]
        if memory.values_until:
            for key in dict.fromkeys(map(_key, self._routes.sent(forward))):
                if key[0] in memory.values_until:
                    yield key, memory.values_until[key[0]]

    def _carried(self, action: Action) -> Iterator[_Key]:
        """Gradients of edges that the stage keeps from the microbatch's I to its W."""
        memory, inputs = self._memory[action.stage], Action(action.stage, "I", action.microbatch)
        if memory.gradients_of_until:
            yield from (k for k in map(_key, self._routes.received(inputs)) if k[0] in memory.gradients_of_until)
        if memory.returned_until:
            yield from (k for k in map(_key, self._routes.sent(inputs)) if k[0] in memory.returned_until)

    def _hold(self, key: _Key, *, saving: bool = False) -> None:
        storage = self._storages[key]
        if storage.holders:
            self._totals[storage.counted_as] -= storage.num_bytes
        storage.holders += 1
        storage.savers += saving
        self._totals[storage.counted_as] += storage.num_bytes

    def _release(self, key: _Key, *, saving: bool = False) -> None:
        storage = self._storages[key]
        self._totals[storage.counted_as] -= storage.num_bytes
        storage.holders -= 1
        storage.savers -= saving
        if storage.holders:
            self._totals[storage.counted_as] += storage.num_bytes
        else:
            del self._storages[key]


def _key(transfer: Transfer) -> _Key:
    return transfer.edge, transfer.microbatch, transfer.source, transfer.is_backward
