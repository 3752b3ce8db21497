"""Timelines as a picture: for every rank a lane of its computations, and lanes of the messages that it sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fxpar.report.timeline import Lane, TimelineBar, draw
from fxpar.schedule.timeline import WAIT, Span, Timeline

_COLOURS = {"F": 1, "B": 2, "I": 4, "W": 3, "value": 6, "gradient": 5}
_LEGEND_OF = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients (I)",
    "W": "weight gradients (W)",
    "value": "values sent",
    "gradient": "gradients sent",
}
_LEGEND = tuple((label, _COLOURS[kind]) for kind, label in _LEGEND_OF.items())


def draw_timelines(title: str, timelines: Mapping[str, Timeline], *, beside: bool = False) -> str:
    """An SVG document of several timelines, by label: one below another or, if `beside`, interleaved rank by rank.

    Bars are labelled with the number of their microbatch. Where a rank waits, its lane is empty.
    """
    lanes = [
        ((rank, name, number) if beside else (number, rank, name), lane)
        for number, (label, timeline) in enumerate(timelines.items())
        for rank, name, lane in _lanes(label if len(timelines) > 1 else "", timeline)
    ]
    lanes.sort(key=lambda placed: placed[0])
    return draw(title, _figures(timelines), [lane for _, lane in lanes], (), "us", _LEGEND)


def _lanes(label: str, timeline: Timeline) -> Iterator[tuple[int, str, Lane]]:
    begin_us = timeline.begin_us
    for rank, name, spans in timeline.tracks():
        if name != WAIT:
            yield rank, name, Lane(f"rank {rank} {name} {label}".rstrip(), _bars(spans, begin_us))


def _bars(spans: Sequence[Span], begin_us: float) -> list[TimelineBar]:
    return [
        TimelineBar(
            span.begin_us - begin_us,
            span.end_us - begin_us,
            span.name if span.microbatch is None else str(span.microbatch),
            f"{span.name}: {span.begin_us - begin_us:,.0f} to {span.end_us - begin_us:,.0f} us",
            _COLOURS.get(span.kind, 0),
        )
        for span in spans
    ]


def _figures(timelines: Mapping[str, Timeline]) -> str:
    """The makespan of each timeline; with at most two of them, there is room for the bubble, too."""
    shown = []
    for label, timeline in timelines.items():
        bubble = "" if len(timelines) > 2 else f", bubble {timeline.bubble_share:.1%}"
        shown.append(f"{label} {timeline.makespan_us / 1000:,.3f} ms{bubble}".lstrip())
    return "; ".join(shown)
