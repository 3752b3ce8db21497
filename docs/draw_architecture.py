"""Draw architecture.svg, the figure of architecture.md, from architecture.toml: `python docs/draw_architecture.py`.

Boxes are as large as their text is in DejaVu, which is wider than the fonts that most browsers take.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SOURCE, DRAWING = Path(__file__).with_name("architecture.toml"), Path(__file__).with_name("architecture.svg")

INK, GREY, RED = "#1f2933", "#52606d", "#9c4221"

# In pixels: a line of text, around the figure, inside a box, inside a panel; between boxes, where an arrow is.
LINE, MARGIN, PADDING, INSET, ARROW = 17.0, 20.0, 10.0, 16.0, 40.0
HEADING_HEIGHT = INSET + 2 * LINE
ARROW_INSET = 26.0  # of the arrow between boxes, from their left edge
TURN = 14.0  # how far from the left panel an arrow between panels turns


@dataclass(frozen=True, slots=True)
class Font:
    """A class of text; `em` is the mean width of its letters, 0 if that depends on the letter."""

    name: str
    size: int
    style: str
    colour: str
    em: float = 0.0

    def width(self, text: str) -> float:
        """An upper bound of the width of `text`."""
        bold = 1.13 if "bold" in self.style else 1.0
        return self.size * (self.em * len(text) or bold * sum(map(_em, text)))


def _em(letter: str) -> float:
    if letter in " iljftrI.,:;'|!()[]/-":
        return 0.4
    return 0.99 if letter in "mMW%@" else 0.8 if letter.isupper() or letter == "w" else 0.62


TITLE, HEADING = Font("title", 17, "bold", INK), Font("heading", 14, "bold", INK)
PROSE, NAME, VALUE = (
    Font("prose", 12, "", GREY),
    Font("name", 12, "bold", INK, 0.605),
    Font("value", 12, "", RED, 0.605),
)


@dataclass(frozen=True, slots=True)
class Box:
    """Functions that run one after another, and the class of the value that goes to the next box, if any does."""

    functions: tuple[str, ...]
    caption: tuple[str, ...]
    value: str = ""
    about: str = ""

    @property
    def lines(self) -> list[tuple[str, Font]]:
        """The text inside."""
        names = [(short_name(function), NAME) for function in self.functions]
        return [*names, *((line, PROSE) for line in self.caption)]

    @property
    def width(self) -> float:
        """What the text inside needs, and what stands beside the arrow below."""
        below = ARROW_INSET + VALUE.width(class_name(self.value)) + PROSE.width(self.about) + 2 * PADDING
        return max(below, *(2 * PADDING + font.width(text) for text, font in self.lines))

    @property
    def height(self) -> float:
        """What the text inside needs."""
        return 2 * PADDING + LINE * len(self.lines)


@dataclass(frozen=True, slots=True)
class Panel:
    """Boxes one below another, from row `first_row` of the figure on."""

    heading: str
    caption: str
    first_row: int
    fill: str
    stroke: str
    boxes: tuple[Box, ...]

    @property
    def width(self) -> float:
        """What its widest box or line needs."""
        lines = HEADING.width(self.heading), PROSE.width(self.caption)
        return 2 * INSET + max(*lines, *(box.width for box in self.boxes))


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that goes from a box of the left panel to one of the right; each is named by one of its functions."""

    source: str
    target: str
    value: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Two panels, and what goes from the left one to the right one."""

    title: str
    note: str
    panels: tuple[Panel, Panel]
    crossings: tuple[Crossing, ...]

    @property
    def gap(self) -> float:
        """Between the panels, where the crossings' labels are."""
        return TURN + 2 * PADDING + max(VALUE.width(class_name(each.value)) for each in self.crossings)


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle; `middle` is half way down."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def short_name(function: str) -> str:
    """A full name without the package, and without a module that has the function's name."""
    *folders, module, name = function.removeprefix("fxpar.").split(".")
    return ".".join([*folders, name] if module == name else [*folders, module, name])


def class_name(value: str) -> str:
    """The last part of a full name."""
    return value.rpartition(".")[2]


def read_figure(source: Path = SOURCE) -> Figure:
    """The figure that a TOML file describes."""
    given = tomllib.loads(source.read_text(encoding="utf-8"))
    left, right = (_panel(each) for each in given["panels"])
    return Figure(given["title"], given["note"], (left, right), tuple(Crossing(**each) for each in given["crossings"]))


def _panel(given: Mapping[str, Any]) -> Panel:
    boxes = [each | {key: tuple(each[key]) for key in ("functions", "caption")} for each in given["boxes"]]
    return Panel(**{**given, "boxes": tuple(Box(**each) for each in boxes)})


def place_boxes(figure: Figure) -> dict[str, Place]:
    """Where the boxes are, by each of their functions; those of one row are equally high in both panels."""
    heights = [0.0] * max(panel.first_row + len(panel.boxes) for panel in figure.panels)
    for panel in figure.panels:
        for row, box in enumerate(panel.boxes, panel.first_row):
            heights[row] = max(heights[row], box.height)
    tops = list(accumulate((height + ARROW for height in heights), initial=MARGIN + 3 * LINE + HEADING_HEIGHT))
    places, x = dict[str, Place](), MARGIN + INSET
    for panel in figure.panels:
        for row, box in enumerate(panel.boxes, panel.first_row):
            place = Place(x, tops[row], panel.width - 2 * INSET, heights[row])
            places |= dict.fromkeys(box.functions, place)
        x += panel.width + figure.gap
    return places


def place_panel(panel: Panel, boxes: Mapping[str, Place]) -> Place:
    """Where a panel is: around its boxes, its heading, and the arrow below the last box if there is one."""
    first, last = (boxes[panel.boxes[number].functions[0]] for number in (0, -1))
    top, bottom = first.y - HEADING_HEIGHT, last.bottom + INSET + (ARROW if panel.boxes[-1].value else 0.0)
    return Place(first.x - INSET, top, panel.width, bottom - top)


def draw(figure: Figure) -> str:
    """The figure as an SVG document."""
    boxes = place_boxes(figure)
    panels = [place_panel(panel, boxes) for panel in figure.panels]
    page = Place(0, 0, max(each.right for each in panels) + MARGIN, max(each.bottom for each in panels) + MARGIN)
    svg = _document(figure.title, page)
    _add_text(svg, MARGIN, MARGIN + LINE, figure.title, TITLE)
    _add_text(svg, MARGIN, MARGIN + 2 * LINE, figure.note, PROSE)
    for panel, place in zip(figure.panels, panels, strict=True):
        _draw_panel(svg, panel, place, boxes)
    for crossing in figure.crossings:
        _draw_crossing(svg, crossing, boxes, panels[0].right + TURN)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _document(title: str, page: Place) -> ElementTree.Element:
    """A page with a background of its own, since browsers may be dark."""
    width, height = f"{page.width:.0f}", f"{page.height:.0f}"
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    svg.attrib |= {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    _add(svg, "title", title)
    _add(svg, "style", "\n".join(["", *map(_rule, (TITLE, HEADING, PROSE, NAME, VALUE)), ""]))
    size = {"markerWidth": "7", "markerHeight": "7"}
    head = _add(_add(svg, "defs"), "marker", id="head", viewBox="0 0 8 8", refX=7, refY=4, orient="auto", **size)
    _add(head, "path", d="M 0 0 L 8 4 L 0 8 z", fill=GREY)
    _add_rectangle(svg, page, "white", "none", radius=12)
    return svg


def _rule(font: Font) -> str:
    """The font in CSS."""
    families = "ui-monospace, Menlo, Consolas, monospace" if font.em else "system-ui, Helvetica, Arial, sans-serif"
    return f".{font.name} {{ font: {font.style} {font.size}px {families}; fill: {font.colour} }}"


def _draw_panel(svg: ElementTree.Element, panel: Panel, place: Place, boxes: Mapping[str, Place]) -> None:
    _add_rectangle(svg, place, panel.fill, panel.stroke, radius=10)
    _add_text(svg, place.x + INSET, place.y + INSET + 5, panel.heading, HEADING)
    _add_text(svg, place.x + INSET, place.y + INSET + 5 + LINE, panel.caption, PROSE)
    for box in panel.boxes:
        at = boxes[box.functions[0]]
        _add_rectangle(svg, at, "white", panel.stroke, radius=6)
        first = at.middle - LINE * len(box.lines) / 2 + 13
        for number, (text, font) in enumerate(box.lines):
            _add_text(svg, at.x + PADDING, first + LINE * number, text, font)
        if box.value:
            _draw_value(svg, box, at.x + ARROW_INSET, at.bottom)


def _draw_value(svg: ElementTree.Element, box: Box, x: float, top: float) -> None:
    """The arrow below a box, and the value that it stands for."""
    name = class_name(box.value)
    _add_arrow(svg, [(x, top), (x, top + ARROW)])
    _add_text(svg, x + PADDING, top + ARROW / 2 + 4, name, VALUE)
    _add_text(svg, x + 2 * PADDING + VALUE.width(name), top + ARROW / 2 + 4, box.about, PROSE)


def _draw_crossing(svg: ElementTree.Element, crossing: Crossing, boxes: Mapping[str, Place], turn: float) -> None:
    """An arrow between the panels, which turns at `turn`, with its label above its end."""
    source, target = boxes[crossing.source], boxes[crossing.target]
    points = [(source.right, source.middle), (turn, source.middle), (turn, target.middle), (target.x, target.middle)]
    _add_arrow(svg, points)
    _add_text(svg, turn + PADDING, target.middle - 6, class_name(crossing.value), VALUE)


def _add_arrow(svg: ElementTree.Element, points: Sequence[tuple[float, float]]) -> None:
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    _add(svg, "polyline", points=way, fill="none", stroke=GREY, stroke_width=1.4, marker_end="url(#head)")


def _add_rectangle(svg: ElementTree.Element, at: Place, fill: str, stroke: str, *, radius: int) -> None:
    _add(svg, "rect", x=at.x, y=at.y, width=at.width, height=at.height, rx=radius, fill=fill, stroke=stroke)


def _add_text(svg: ElementTree.Element, x: float, y: float, text: str, font: Font) -> None:
    _add(svg, "text", text, x=x, y=y, class_=font.name)


def _add(
    parent: ElementTree.Element, tag: str, text: str | None = None, **attributes: str | float
) -> ElementTree.Element:
    written = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in attributes.items()}
    added = ElementTree.SubElement(parent, tag, {name.strip("_").replace("_", "-"): v for name, v in written.items()})
    added.text = text
    return added


def main() -> None:
    """Write the drawing beside its source."""
    DRAWING.write_text(draw(read_figure()), encoding="utf-8")


if __name__ == "__main__":
    main()
