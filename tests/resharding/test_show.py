"""A plan as a table and as a picture says who sends what to whom, and when."""

from __future__ import annotations

from xml.etree import ElementTree

from fxpar.resharding.plan import ReshardPlan, make_plan
from fxpar.resharding.tile import Tile

SVG = "{http://www.w3.org/2000/svg}"


def plan() -> ReshardPlan:
    """Two halves on a host each go to two hosts of two ranks, and to a rank beside one of them."""
    first, second, whole = (Tile((ends,)) for ends in (((0, 4),), ((4, 8),), ((0, 8),)))
    hosts = [0, 1, 2, 2, 3, 3, 1]
    return make_plan({0: first, 1: second}, dict.fromkeys(range(2, 7), whole), 4, hosts)


def test_the_table_has_a_line_per_relay_with_its_way() -> None:
    head, *lines = str(plan()).splitlines()
    assert head.startswith("broadcast, ordered by best: 2 unit tasks, ")
    assert head.endswith("bound 32 bytes at one interface, ratio 1.000")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert len(rows) == len(plan().relays)
    assert ["1", "[4:8]", "16", "1@1+6", "1", "", "inside the host"] in rows
    assert any(row[3] == "0@0 -> 2@2+3 -> 4@3+5 -> 6@1" for row in rows), rows


def test_the_timeline_shows_both_directions_of_every_interface_in_use() -> None:
    picture = ElementTree.fromstring(plan().timeline())
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("host")] == [
        "host 0 sends",
        "host 1 sends",
        "host 2 sends",
        "host 3 sends",
        "host 1 receives",
        "host 2 receives",
        "host 3 receives",
    ]
    assert "bound" in texts
    bars = [group.findtext(f"{SVG}title") for group in picture.iter(f"{SVG}g")]
    hops = sum(relay.num_hops for relay in plan().relays)
    assert len(bars) == 2 * hops, "one where it leaves, one where it arrives"
    assert any(bar and bar.startswith("task 0: [0:4], 0@0 -> ") and bar.endswith("16 bytes") for bar in bars)
