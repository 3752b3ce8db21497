"""The timelines of a step as the page draws them: the predicted one, and the measured one if there is any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from fxpar.analysis.critical_path import Dependencies
from fxpar.analysis.dumped_step import DumpedStep
from fxpar.analysis.predicted_parts import runs_of, waits_us
from fxpar.report.facts import ONCE
from fxpar.schedule import Span, Timeline
from fxpar.schedule.timeline import COMPUTE


def timelines(step: DumpedStep) -> Iterator[dict[str, Any]]:
    """The tracks of each timeline, with what is critical and what is exposed."""
    yield {"label": "simulated", **_timeline(_with_once(step))}
    if step.measured is not None:
        yield {"label": "measured", **_timeline(step.measured)}


def waits(step: DumpedStep) -> dict[str, dict[str, float]]:
    """By stage and kind of action, as `0F`: for how long it waits for the collectives over each axis."""
    found = {
        f"{stage}{kind}": {axis: round(us, 2) for axis, us in waits_us(step, stage, kind).items() if us}
        for stage in step.stages
        for kind in runs_of(step, stage)
    }
    return {action: of_action for action, of_action in found.items() if of_action}


def _with_once(step: DumpedStep) -> Timeline:
    """The simulated step with what each rank runs once, after its last action."""
    ends: dict[int, float] = defaultdict(float)
    for span in step.simulated.spans:
        ends[span.rank] = max(ends[span.rank], span.end_us)
    once = [
        Span(rank, COMPUTE, "sums of gradients", end_us, end_us + step.once_us(rank), ONCE)
        for rank, end_us in ends.items()
        if step.once_us(rank)
    ]
    return Timeline((*step.simulated.spans, *once))


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """The tracks of a timeline: for each span begin, end, name, kind, stage, microbatch, and whether it is critical.

    Of a wait, the part that communication exposes begins at the last figure.
    """
    dependencies = Dependencies(timeline)
    critical = set(map(id, dependencies.critical_path()))
    exposed = {id(each.wait): each.begin_us for each in dependencies.exposed()}
    tracks = [
        {
            "rank": rank,
            "lane": lane,
            "spans": [
                [
                    round(span.begin_us, 2),
                    round(span.end_us, 2),
                    span.name,
                    span.kind,
                    span.stage,
                    span.microbatch,
                    int(id(span) in critical),
                    round(exposed.get(id(span), span.end_us), 2),
                ]
                for span in spans
            ],
        }
        for rank, lane, spans in timeline.tracks()
    ]
    return {"end_us": timeline.makespan_us, "tracks": tracks}
