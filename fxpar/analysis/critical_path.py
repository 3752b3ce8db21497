"""What a step's time depends on: the critical path through a timeline, and the waits that communication causes."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fxpar.schedule import Span, Timeline
from fxpar.schedule.timeline import COMPUTE, WAIT

_SHORTEST_WAIT = 1e-3
"""As a share of the step: a shorter wait delays nothing. A wait for what has arrived takes some time, too."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """The part of a wait in which the message was already computed: from `begin_us` to the end of the wait."""

    wait: Span
    begin_us: float

    @property
    def time_us(self) -> float:
        """How long it is."""
        return self.wait.end_us - self.begin_us


@dataclass(frozen=True)
class Dependencies:
    """What the computations of a timeline wait for."""

    timeline: Timeline
    _computed: dict[tuple[int, str, int], Span] = field(init=False, default_factory=dict)
    _computations: dict[int, list[Span]] = field(init=False, default_factory=lambda: defaultdict(list))
    _waits: dict[int, list[Span]] = field(init=False, default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for span in sorted(self.timeline.spans, key=lambda each: (each.begin_us, each.end_us)):
            if span.lane == COMPUTE:
                self._computations[span.rank].append(span)
                # I makes the gradients that a whole backward returns, and W those of weights, which nothing waits for.
                if span.kind != "W" and span.stage is not None and span.microbatch is not None:
                    self._computed[span.stage, "value" if span.kind == "F" else "gradient", span.microbatch] = span
            elif span.lane == WAIT:
                self._waits[span.rank].append(span)

    def maker(self, message: Span) -> Span | None:
        """The computation that made what is waited for or sent; None if the timeline lacks it."""
        if message.stage is None or message.microbatch is None:
            return None
        return self._computed.get((message.stage, message.kind, message.microbatch))

    def exposed(self) -> Iterator[Exposed]:
        """The parts of all waits that communication causes: without it they would have ended when they were made."""
        for waits in self._waits.values():
            for wait in waits:
                maker = self.maker(wait)
                begin_us = wait.begin_us if maker is None else max(wait.begin_us, maker.end_us)
                if begin_us < wait.end_us:
                    yield Exposed(wait, begin_us)

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of computations, and of waits for messages between them, that ends with the step; in order.

        A computation depends on the one before it on its rank or, where the rank waited, on the maker of the message.
        """
        everything = [span for spans in self._computations.values() for span in spans]
        span = max(everything, key=lambda each: each.end_us, default=None)
        path: list[Span] = []
        while span is not None:
            path.append(span)
            before = self._before(span)
            wait = self._last_wait(span, 0.0 if before is None else before.end_us)
            maker = None if wait is None else self.maker(wait)
            if wait is not None and maker is not None and maker.begin_us < span.begin_us:
                path.append(wait)
                before = maker
            span = before
        return tuple(reversed(path))

    def _before(self, span: Span) -> Span | None:
        computations = self._computations[span.rank]
        place = bisect_left(computations, span.begin_us, key=lambda each: each.begin_us)
        return computations[place - 1] if place else None

    def _last_wait(self, span: Span, since_us: float) -> Span | None:
        """The last wait of any length on the rank of `span` before it."""
        waits = self._waits[span.rank]
        place = bisect_left(waits, since_us, key=lambda each: each.begin_us)
        shortest_us = _SHORTEST_WAIT * self.timeline.makespan_us
        between = (each for each in waits[place:] if each.begin_us < span.begin_us)
        long = [each for each in between if each.end_us - each.begin_us > shortest_us]
        return long[-1] if long else None
