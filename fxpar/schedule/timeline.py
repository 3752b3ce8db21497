"""Timelines of a step, predicted or measured: what every pipe rank does when, and figures such as the bubble."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxpar.errors import InvalidTimelineError
from fxpar.schedule.action import Action
from fxpar.schedule.transfer import Transfer

COMPUTE, WAIT, SENDS, COLLECTIVES = "compute", "wait", "sends", "collectives"
"""The lanes of a rank: its computations, its idle waits for messages, the messages that it has in flight, and the
starts of collectives and waits for them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one `rank` does from `begin_us` to `end_us`; what runs concurrently is in different lanes.

    `kind` is that of an action, "value" or "gradient" for messages, "start" or "wait" for collectives; `stage` is the
    one that computes or sends.
    """

    rank: int
    lane: str
    name: str
    begin_us: float
    end_us: float
    kind: str = ""
    stage: int | None = None
    microbatch: int | None = None

    @staticmethod
    def of_action(rank: int, action: Action, begin_us: float, end_us: float) -> Span:
        """The span of a computation."""
        return Span(rank, COMPUTE, str(action), begin_us, end_us, action.kind, action.stage, action.microbatch)

    @staticmethod
    def of_transfer(rank: int, lane: str, transfer: Transfer, begin_us: float, end_us: float) -> Span:
        """The span of a wait for a message, or of its transfer, depending on `lane`."""
        kind = "gradient" if transfer.is_backward else "value"
        return Span(rank, lane, str(transfer), begin_us, end_us, kind, transfer.source, transfer.microbatch)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of a step, in any order, on a clock that all ranks share."""

    spans: tuple[Span, ...]

    @property
    def begin_us(self) -> float:
        """When the first rank begins, which is the start of the step."""
        return min((span.begin_us for span in self.spans), default=0.0)

    @property
    def makespan_us(self) -> float:
        """From the first begin to the last end."""
        return max((span.end_us for span in self.spans), default=0.0) - self.begin_us

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that occur, ascending."""
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def busy_us(self) -> dict[int, float]:
        """By rank, the time in which it computes."""
        busy = dict.fromkeys(self.ranks, 0.0)
        for span in self.spans:
            if span.lane == COMPUTE:
                busy[span.rank] += span.end_us - span.begin_us
        return busy

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they do not compute: warm-up, drain, and waits for messages."""
        whole_us = self.makespan_us * len(self.ranks)
        return 1 - sum(self.busy_us.values()) / whole_us if whole_us else 0.0

    def from_start(self) -> Timeline:
        """The same, on a clock that is 0 when the first rank begins."""
        zero_us = self.begin_us
        moved = (replace(s, begin_us=s.begin_us - zero_us, end_us=s.end_us - zero_us) for s in self.spans)
        return Timeline(tuple(moved))

    def tracks(self) -> Iterator[tuple[int, str, list[Span]]]:
        """Rank, lane, and spans that do not overlap; a lane with overlapping spans has several such tracks."""
        lanes: defaultdict[tuple[int, int, str], list[Span]] = defaultdict(list)
        order = {COMPUTE: 0, WAIT: 1, SENDS: 2, COLLECTIVES: 3}
        for span in self.spans:
            lanes[span.rank, order.get(span.lane, len(order)), span.lane].append(span)
        for (rank, _, lane), spans in sorted(lanes.items(), key=lambda item: item[0]):
            for track in _apart(spans):
                yield rank, lane, track

    def save(self, path: str | Path) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing show."""
        save_trace(path, {"": self})

    @staticmethod
    def load(path: str | Path) -> Timeline:
        """What `save` wrote to the file `path`, or to all files `*timeline*.json` below that folder.

        Raises InvalidTimelineError if there is no such trace.
        """
        root = Path(path)
        files = sorted(root.rglob("*timeline*.json")) if root.is_dir() else [root]
        if not files:
            raise InvalidTimelineError(str(path), "no file *timeline*.json below it")
        return Timeline.merge(map(_load, files))

    @staticmethod
    def merge(timelines: Iterable[Timeline]) -> Timeline:
        """One timeline from those of several ranks, whose clocks must agree."""
        return Timeline(tuple(span for timeline in timelines for span in timeline.spans))


def save_trace(path: str | Path, timelines: Mapping[str, Timeline], about: Mapping[str, str] | None = None) -> None:
    """Write one trace of several timelines, by label; each of their ranks is a process in it, each lane a thread.

    Args:
        about: what viewers are to show as facts about the whole trace.
    """
    events = [event for number, (label, line) in enumerate(timelines.items()) for event in _events(number, label, line)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


_PROCESSES = 1_000_000  # more than a timeline has ranks


def _events(number: int, label: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    named: set[int] = set()
    for thread, (rank, lane, spans) in enumerate(timeline.tracks()):
        process = number * _PROCESSES + rank
        if process not in named:
            named.add(process)
            yield _metadata(process, 0, "process_name", name=f"rank {rank} {label}".rstrip())
            yield _metadata(process, 0, "process_sort_index", sort_index=process)
        yield _metadata(process, thread, "thread_name", name=lane)
        yield _metadata(process, thread, "thread_sort_index", sort_index=thread)
        for span in spans:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": process,
                "tid": thread,
                "ts": span.begin_us,
                "dur": span.end_us - span.begin_us,
                "args": {
                    "rank": span.rank,
                    "end_us": span.end_us,
                    "kind": span.kind,
                    "stage": span.stage,
                    "microbatch": span.microbatch,
                },
            }


def _metadata(process: int, thread: int, what: str, **about: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": about}


def _load(path: Path) -> Timeline:
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return Timeline(tuple(_from_event(event) for event in events if event["ph"] == "X"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidTimelineError(str(path), error) from None


def _from_event(event: Mapping[str, Any]) -> Span:
    about = event["args"]
    times = float(event["ts"]), float(about["end_us"])
    return Span(about["rank"], event["cat"], event["name"], *times, about["kind"], about["stage"], about["microbatch"])


def _apart(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans on as few tracks as possible without overlaps, each in the order of time."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin_us, span.end_us)):
        free = next((track for track in tracks if track[-1].end_us <= span.begin_us), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks
