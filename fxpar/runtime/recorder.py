"""Record a step: when its actions, waits and collectives began and ended, and the activation memory of backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fxpar.lowering.observed_collectives import WAIT_FOR, observing_collectives
from fxpar.runtime.clock import clock_of
from fxpar.runtime.step_state import StepState
from fxpar.schedule import Compute, Instruction, Send, Wait
from fxpar.schedule.timeline import COLLECTIVES, SENDS, WAIT, Span, Timeline


class Recorder:
    """Observes the step of one pipe rank.

    `saved_peak_bytes` is the peak of the memory saved for backwards. Each storage counts once; parameters (gathered or
    not), buffers and inputs of the step do not count.
    """

    def __init__(self, rank: int, device_type: str = "cpu") -> None:
        self._rank = rank
        self._clock = clock_of(device_type)
        self._noted: list[tuple[Compute | Wait | Send, Any, Any]] = []
        self._collectives: list[tuple[str, Any, Any]] = []
        self._ends: list[Any] = []
        self.saved_peak_bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context that is the whole step, whose collectives are recorded, too."""
        self._ends.append(self._clock.now())
        with observing_collectives(self._observe_collective):
            yield
        self._ends.append(self._clock.now())

    def observe(self, instruction: Instruction, state: StepState, run: Callable[[], Any]) -> None:
        """Run an instruction, and record it."""
        begin = self._clock.now()
        run()
        if isinstance(instruction, Compute | Wait | Send):
            self._noted.append((instruction, begin, self._clock.now()))
        if isinstance(instruction, Compute):
            self.saved_peak_bytes = max(self.saved_peak_bytes, _kept_bytes(state))

    def _observe_collective(self, label: str, run: Callable[[], Any]) -> Any:
        begin = self._clock.now()
        result = run()
        self._collectives.append((label, begin, self._clock.now()))
        return result

    @property
    def timeline(self) -> Timeline:
        """What was recorded, in wall-clock time; the span of a send is how long it kept the rank from computing."""
        return Timeline(tuple(self._span(*noted) for noted in self._noted))

    @property
    def collectives(self) -> Timeline:
        """The collectives of all kinds of graphs, and of gradients, within the actions and after them."""
        return Timeline(tuple(self._span_of_collective(*noted) for noted in self._collectives))

    @property
    def step_us(self) -> tuple[float, float]:
        """When the step began, and when it ended; this may wait for the device."""
        begin, end = map(self._clock.us, self._ends)
        return begin, end

    def _span(self, instruction: Compute | Wait | Send, begin: Any, end: Any) -> Span:
        times = self._clock.us(begin), self._clock.us(end)
        match instruction:
            case Compute(action):
                return Span.of_action(self._rank, action, *times)
            case Wait(transfer):
                return Span.of_transfer(self._rank, WAIT, transfer, *times)
            case Send(transfer):
                return Span.of_transfer(self._rank, SENDS, transfer, *times)

    def _span_of_collective(self, label: str, begin: Any, end: Any) -> Span:
        kind = "wait" if label.startswith(WAIT_FOR) else "start"
        return Span(self._rank, COLLECTIVES, label, self._clock.us(begin), self._clock.us(end), kind)


def _kept_bytes(state: StepState) -> int:
    resident = {_storage(value) for value in _resident(state)}
    kept = {
        _storage(value): value.untyped_storage().nbytes()
        for values in (*state.saved.values(), *state.carried.values())
        for value in values
    }
    return sum(num_bytes for storage, num_bytes in kept.items() if storage not in resident)


def _resident(state: StepState) -> Iterator[Tensor]:
    yield from state.parameters.values()
    for gathered in state.gathered.values():
        yield from gathered.values()
    yield from state.buffers.values()
    for microbatches in state.inputs.values():
        yield from microbatches


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
