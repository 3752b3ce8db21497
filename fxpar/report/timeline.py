"""Timelines as SVG: a lane per resource, a bar for each time in which it is busy."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

_LANE_HEIGHT, _BAR_HEIGHT, _LABEL_WIDTH, _CHART_WIDTH, _TOP = 26, 20, 130, 900, 64
_LETTER_WIDTH = 7
_GOLDEN = 0.618  # steps of the hue, so that consecutive numbers differ in colour


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """A bar from `begin` to `end`; `colour` is the number of a colour, `details` is the tooltip."""

    begin: float
    end: float
    label: str
    details: str
    colour: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A resource, such as one direction of a host's interface."""

    label: str
    bars: Sequence[TimelineBar]


def draw(
    title: str,
    subtitle: str,
    lanes: Sequence[Lane],
    marks: Sequence[tuple[float, str]],
    unit: str,
    legend: Sequence[tuple[str, int]] = (),
) -> str:
    """An SVG document; `marks` are vertical lines at points of time, and times are in `unit`.

    `legend` has a label for each colour number.
    """
    last = max([0.0, *(bar.end for lane in lanes for bar in lane.bars), *(at for at, _ in marks)]) or 1.0
    scale = _CHART_WIDTH / last
    height = _TOP + len(lanes) * _LANE_HEIGHT + 30
    left = max([_LABEL_WIDTH, *(_LETTER_WIDTH * len(lane.label) + 16 for lane in lanes)])
    width = left + _CHART_WIDTH + 20
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "width": str(width),
            "height": str(height),
            "font-family": "sans-serif",
            "font-size": "12",
        },
    )
    _add(svg, "rect", width="100%", height="100%", fill="white")
    _add(svg, "text", title, x=8, y=18, font_size=14, font_weight="bold")
    _add(svg, "text", subtitle, x=8, y=36, fill="#555")
    for number, lane in enumerate(lanes):
        _draw_lane(svg, lane, left, _TOP + number * _LANE_HEIGHT, scale)
    for at, label in marks:
        _draw_mark(svg, left + at * scale, _TOP + len(lanes) * _LANE_HEIGHT, label)
    _draw_legend(svg, legend, left)
    _add(svg, "text", f"0 {unit}", x=left, y=height - 8)
    _add(svg, "text", f"{last:,.10g} {unit}", x=left + _CHART_WIDTH, y=height - 8, text_anchor="end")
    return ElementTree.tostring(svg, encoding="unicode")


def _draw_lane(svg: ElementTree.Element, lane: Lane, left: float, top: float, scale: float) -> None:
    _add(svg, "text", lane.label, x=8, y=top + _BAR_HEIGHT - 5)
    _add(svg, "line", x1=left, x2=left + _CHART_WIDTH, y1=top + 23, y2=top + 23, stroke="#ddd")
    for bar in lane.bars:
        x, bar_width = left + bar.begin * scale, max((bar.end - bar.begin) * scale, 1)
        group = ElementTree.SubElement(svg, "g")
        _add(group, "title", bar.details)
        _add(group, "rect", x=x, y=top, width=bar_width, height=_BAR_HEIGHT, fill=_colour(bar.colour), stroke="white")
        if bar_width > _LETTER_WIDTH * len(bar.label) + 4:
            _add(group, "text", bar.label, x=x + bar_width / 2, y=top + 14, text_anchor="middle")


def _draw_legend(svg: ElementTree.Element, legend: Sequence[tuple[str, int]], left: float) -> None:
    for name, colour in legend:
        _add(svg, "rect", x=left, y=44, width=12, height=12, fill=_colour(colour))
        _add(svg, "text", name, x=left + 16, y=54)
        left += 32 + _LETTER_WIDTH * len(name)


def _draw_mark(svg: ElementTree.Element, x: float, bottom: float, label: str) -> None:
    _add(svg, "line", x1=x, x2=x, y1=_TOP - 6, y2=bottom, stroke="#c00", stroke_dasharray="4 3")
    _add(svg, "text", label, x=x - 4, y=_TOP - 10, text_anchor="end", fill="#c00")


def _colour(number: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(number * _GOLDEN % 1, 0.75, 0.6)
    return f"#{int(255 * red):02x}{int(255 * green):02x}{int(255 * blue):02x}"


def _add(parent: ElementTree.Element, tag: str, text: str | None = None, **attributes: str | float) -> None:
    named = {
        name.replace("_", "-"): f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in attributes.items()
    }
    ElementTree.SubElement(parent, tag, named).text = text
