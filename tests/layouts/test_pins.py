"""What a pin allows, and from where it lets the search start."""

from __future__ import annotations

from fxpar.ir.hints import Grouped
from fxpar.ir.layout import REPLICATE, Layout, Partial, Shard
from fxpar.layouts.pins import Pin


def test_a_hint_on_a_dim_leaves_its_digit_open() -> None:
    pin = Pin.hinted(("x", None))
    assert pin.fixed_at_use
    assert pin.allows("x", Shard(0, 2)) and pin.allows("x", Shard(0, 2, 3))
    assert not pin.allows("x", REPLICATE) and not pin.allows("x", Shard(1, 2)) and not pin.allows("x", Partial())
    assert pin.seed("x", 2) == Shard(0, 2)


def test_a_grouped_hint_settles_the_digit() -> None:
    pin = Pin.hinted((None, Grouped(3, "x")))
    assert pin.allows("x", Shard(1, 2, 3)) and not pin.allows("x", Shard(1, 2))
    assert pin.seed("x", 2) == Shard(1, 2, 3)


def test_an_axis_that_a_pin_leaves_out_is_replicated() -> None:
    pin = Pin({"x": (0, None)})
    assert pin.settles("y")
    assert pin.allows("y", REPLICATE) and not pin.allows("y", Shard(1, 2))
    assert pin.seed("y", 2) == REPLICATE


def test_a_hint_leaves_the_axes_open_that_it_does_not_name_unless_it_names_none() -> None:
    assert Pin.hinted(("x", None)).settles("x") and not Pin.hinted(("x", None)).settles("y")
    assert Pin.hinted((None, None)).settles("x") and Pin.hinted((None, None)).settles("y")


def test_an_exact_pin_allows_one_layout_and_lets_readers_move_it() -> None:
    pin = Pin.exactly(Layout((12, 4), (("y", Shard(0, 2)), ("x", Shard(0, 3, 2)))))
    assert not pin.fixed_at_use
    assert pin.allows("x", Shard(0, 3, 2)) and not pin.allows("x", Shard(0, 3))
    assert pin.allows("y", Shard(0, 2)) and not pin.allows("y", REPLICATE)
