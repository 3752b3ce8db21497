"""An edge lies for every stage of one rank as it does for the first of them that has it."""

from __future__ import annotations

from torch import fx, nn

from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.layouts.pins import Pin
from fxpar.passes.pins.pin_edges import pin_edges

FIRST, SECOND = Port(PortKind.EDGE, "first"), Port(PortKind.EDGE, "second")
WHOLE = Layout((4, 6))
ROWS, COLUMNS = (WHOLE.with_placement("x", Shard(dim, 2)) for dim in (0, 1))


def _reading(index: int, *ports: Port) -> JointGraph:
    """A stage that takes `ports`, and computes nothing."""
    return JointGraph(index, fx.GraphModule(nn.Module(), fx.Graph()), ports, (), (), ())


def _border(*, reads: dict[Port, Layout] | None = None, makes: dict[Port, Layout] | None = None) -> StageBorder:
    return StageBorder(reads or {}, makes or {}, {}, {})


EARLIER = [_border(makes={FIRST: ROWS}), _border(reads={FIRST: COLUMNS}, makes={SECOND: COLUMNS})]


def test_what_a_stage_of_the_same_rank_has_made_stays_as_it_is() -> None:
    assert pin_edges(_reading(2, FIRST), [0, 1, 0], EARLIER) == {FIRST: Pin.exactly(ROWS)}


def test_what_a_stage_of_the_same_rank_has_read_stays_as_it_came() -> None:
    assert pin_edges(_reading(2, FIRST, SECOND), [0, 1, 1], EARLIER) == {
        FIRST: Pin.exactly(COLUMNS),
        SECOND: Pin.exactly(COLUMNS),
    }


def test_what_only_other_ranks_have_is_free() -> None:
    assert pin_edges(_reading(2, FIRST, SECOND), [0, 1, 2], EARLIER) == {}


def test_parameters_and_inputs_are_not_its_concern() -> None:
    ports = Port(PortKind.PARAMETER, "first"), Port(PortKind.INPUT, "0")
    earlier = [_border(reads=dict.fromkeys(ports, WHOLE)), *EARLIER[1:]]
    assert pin_edges(_reading(2, *ports), [0, 1, 0], earlier) == {}


def test_stages_of_one_rank_keep_a_sharded_value_where_it_is() -> None:
    pin = pin_edges(_reading(2, FIRST), [0, 1, 0], EARLIER)[FIRST]
    assert pin.allows("x", Shard(0, 2)) and not pin.allows("x", Shard(1, 2))
    assert not pin.fixed_at_use, "its readers may move it within their stage"
