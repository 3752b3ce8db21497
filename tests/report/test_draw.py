"""A picture has room for its labels, and says what its colours mean if asked to."""

from xml.etree import ElementTree

from fxpar.report.timeline import Lane, TimelineBar, draw

SVG = "{http://www.w3.org/2000/svg}"


def _drawn(label: str, legend: list[tuple[str, int]]) -> ElementTree.Element:
    lanes = [Lane(label, [TimelineBar(0.0, 5.0, "a", "the first", 1), TimelineBar(5.0, 10.0, "b", "the second", 2)])]
    return ElementTree.fromstring(draw("title", "subtitle", lanes, [], "us", legend))


def _bars(picture: ElementTree.Element) -> list[dict[str, str]]:
    return [rect.attrib for group in picture.iter(f"{SVG}g") for rect in group.iter(f"{SVG}rect")]


def test_bars_begin_right_of_the_longest_label() -> None:
    short, long = (float(_bars(_drawn(label, []))[0]["x"]) for label in ("a", "a label of forty letters, or nearly so"))
    assert short < 7 * 38 < long


def test_bars_are_as_wide_as_they_last() -> None:
    first, second = _bars(_drawn("a", []))
    assert float(first["x"]) + float(first["width"]) == float(second["x"])
    assert first["width"] == second["width"]


def test_the_legend_has_the_colours_of_the_bars() -> None:
    picture = _drawn("a", [("one", 1), ("two", 2)])
    shown = [rect.attrib["fill"] for rect in picture.findall(f"{SVG}rect")[1:]]
    assert shown == [bar["fill"] for bar in _bars(picture)]
    assert {"one", "two"} < {text.text for text in picture.findall(f"{SVG}text")}
