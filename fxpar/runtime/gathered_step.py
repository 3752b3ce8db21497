"""A recorded step of all ranks, on the clock of rank 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fxpar.hardware.machine import peak_process_bytes
from fxpar.runtime.recorder import Recorder
from fxpar.schedule.timeline import COLLECTIVES, SENDS, WAIT, Span, Timeline, save_trace
from fxpar.world.agreement import of_all_ranks
from fxpar.world.clock_offsets import ClockOffset, measure_clock_offsets
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank did in a step: its duration, all spans, and the most memory that it has used so far."""

    step_us: float
    spans: tuple[Span, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class GatheredStep:
    """The records of all ranks, with spans on the clock of rank 0, and how far the clocks were apart."""

    records: Sequence[RankRecord]
    offsets: Sequence[ClockOffset]

    @property
    def step_us(self) -> float:
        """The longest time that a rank took."""
        return max(record.step_us for record in self.records)

    @property
    def timeline(self) -> Timeline:
        """All spans, by the ranks of the world."""
        return Timeline(tuple(span for record in self.records for span in record.spans))

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they run no action: see `Timeline.bubble_share`."""
        return 1 - sum(self.timeline.busy_us.values()) / (self.step_us * len(self.records))

    @property
    def exposed_us(self) -> float:
        """The time in which communication keeps a rank from computing, on average over the ranks.

        That is the waits for collectives, also for slower ranks, and the waits for values of other stages, from when
        these were sent: before that, a rank waits for the computation of another stage.
        """
        spans = self.timeline.spans
        sent_us: defaultdict[str, float] = defaultdict(float)
        for span in spans:
            if span.lane == SENDS:
                sent_us[span.name] = max(sent_us[span.name], span.begin_us)
        waits = [span.end_us - max(span.begin_us, sent_us[span.name]) for span in spans if span.lane == WAIT]
        collectives = [s.end_us - s.begin_us for s in spans if s.lane == COLLECTIVES and s.kind == "wait"]
        return (sum(wait for wait in waits if wait > 0) + sum(collectives)) / len(self.records)

    def save(self, directory: Path, num_pipe_ranks: int) -> list[Path]:
        """Write `trace.json`, with all ranks, and a timeline for each pipe rank; returns the paths of these.

        Ranks with the same index on that axis run the same actions: a timeline is that of the first of them.
        """
        directory.mkdir(parents=True, exist_ok=True)
        save_trace(directory / "trace.json", {"": self.timeline}, self._about())
        apart = len(self.records) // num_pipe_ranks
        paths = [directory / f"timeline.rank{place * apart}.json" for place in range(num_pipe_ranks)]
        for place, path in enumerate(paths):
            _of_pipe_rank(place, self.records[place * apart]).save(path)
        return paths

    def _about(self) -> Mapping[str, str]:
        return {
            f"clock of rank {rank}": f"{each.offset_us:+.1f} us to that of rank 0, give or take {each.error_us:.1f} us"
            for rank, each in enumerate(self.offsets)
        }


def gather_step(recorder: Recorder, mesh: Mesh) -> GatheredStep:
    """The step as all ranks recorded it; a collective of all ranks.

    Raises:
        PeerLostError: another rank has ended.
    """
    offsets = measure_clock_offsets(mesh.hosts, mesh.device_type)
    begin_us, end_us = recorder.step_us
    spans = Timeline.merge([recorder.timeline, recorder.collectives]).spans
    own = RankRecord(end_us - begin_us, tuple(replace(span, rank=mesh.rank) for span in spans), _peak_bytes(mesh))
    records = of_all_ranks(own)
    return GatheredStep([_moved(*found) for found in zip(records, offsets, strict=True)], offsets)


def _of_pipe_rank(place: int, record: RankRecord) -> Timeline:
    """What a rank did besides waiting for collectives, by its index on the pipe axis."""
    return Timeline(tuple(replace(span, rank=place) for span in record.spans if span.lane != COLLECTIVES))


def moved_to_first_clock(timeline: Timeline, offset: ClockOffset) -> Timeline:
    """The timeline of one rank, on the clock of rank 0."""
    us = offset.offset_us
    return Timeline(tuple(replace(s, begin_us=s.begin_us + us, end_us=s.end_us + us) for s in timeline.spans))


def _moved(record: RankRecord, offset: ClockOffset) -> RankRecord:
    return replace(record, spans=moved_to_first_clock(Timeline(record.spans), offset).spans)


def _peak_bytes(mesh: Mesh) -> int:
    return torch.cuda.max_memory_allocated() if mesh.device_type == "cuda" else peak_process_bytes()
