"""A picture of timelines has a lane per rank for what it computes and sends, and says what its colours mean."""

from xml.etree import ElementTree

from fxpar.schedule import Action, Span, Timeline, Transfer
from fxpar.schedule.picture import draw_timelines
from fxpar.schedule.timeline import SENDS, WAIT

SVG = "{http://www.w3.org/2000/svg}"
VALUE = Transfer("out0", 5, 0, (1,))
STEP = Timeline(
    (
        Span.of_action(0, Action(0, "F", 5), 10.0, 20.0),
        Span.of_transfer(0, SENDS, VALUE, 20.0, 30.0),
        Span.of_transfer(1, WAIT, VALUE, 10.0, 30.0),
        Span.of_action(1, Action(1, "B", 5), 30.0, 40.0),
    )
)


def _texts(picture: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def _lanes(picture: str) -> list[str]:
    return [text for text in _texts(picture) if text.startswith("rank ")]


def test_ranks_have_lanes_for_what_they_compute_and_send() -> None:
    assert _lanes(draw_timelines("a step", {"": STEP})) == ["rank 0 compute", "rank 0 sends", "rank 1 compute"]


def test_timelines_lie_below_one_another_or_beside_rank_by_rank() -> None:
    both = {"simulated": STEP, "measured": STEP}
    assert _lanes(draw_timelines("a step", both))[2:4] == ["rank 1 compute simulated", "rank 0 compute measured"]
    assert _lanes(draw_timelines("a step", both, beside=True)) == [
        "rank 0 compute simulated",
        "rank 0 compute measured",
        "rank 0 sends simulated",
        "rank 0 sends measured",
        "rank 1 compute simulated",
        "rank 1 compute measured",
    ]


def test_bars_bear_their_microbatch_and_start_with_the_step() -> None:
    picture = ElementTree.fromstring(draw_timelines("a step", {"": STEP}))
    bars = list(picture.iter(f"{SVG}g"))
    assert [group.findtext(f"{SVG}text") for group in bars] == ["5", "5", "5"]
    lefts = [float(rect.attrib["x"]) for group in bars for rect in group.iter(f"{SVG}rect")]
    assert [round(left - lefts[0]) for left in lefts] == [0, 300, 600]
    assert next(group.findtext(f"{SVG}title") for group in bars) == "0F5: 0 to 10 us"


def test_colours_tell_kinds_apart_as_the_legend_says() -> None:
    picture = ElementTree.fromstring(draw_timelines("a step", {"": STEP}))
    bars = {rect.attrib["fill"] for group in picture.iter(f"{SVG}g") for rect in group.findall(f"{SVG}rect")}
    assert len(bars) == 3
    legend = {rect.attrib["fill"] for rect in picture.findall(f"{SVG}rect")}
    assert bars < legend
    assert {"forward", "weight gradients (W)", "gradients sent"} < set(_texts(ElementTree.tostring(picture, "unicode")))


def test_the_figures_of_each_timeline_are_on_it() -> None:
    assert "0.030 ms, bubble 66.7%" in _texts(draw_timelines("a step", {"": STEP}))
    assert "a 0.030 ms; b 0.030 ms; c 0.030 ms" in _texts(draw_timelines("a step", {"a": STEP, "b": STEP, "c": STEP}))
