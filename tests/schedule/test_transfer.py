"""Edges between stages decide what every action receives and sends."""

from dataclasses import replace

import pytest

from fxpar.schedule import Action, Edge, Routes, Transfer, chain

SKIP = Edge("skip", 0, (1, 3))
MASK = Edge("mask", 0, (1,), differentiable=False)
HIDDEN = Edge("hidden", 1, (3,))
ROUTES = Routes([SKIP, MASK, HIDDEN])


def test_a_forward_sends_a_value_once_to_all_its_targets() -> None:
    sent = ROUTES.sent(Action(0, "F", 5))
    assert sent == [Transfer("skip", 5, 0, (1, 3)), Transfer("mask", 5, 0, (1,))]


def test_a_forward_first_sends_what_a_near_stage_needs() -> None:
    routes = Routes([Edge("far", 0, (3,)), Edge("near", 0, (1, 3)), Edge("middle", 0, (2,))])
    assert [transfer.edge for transfer in routes.sent(Action(0, "F", 0))] == ["near", "middle", "far"]


def test_a_forward_receives_every_edge_that_ends_in_its_stage() -> None:
    assert ROUTES.received(Action(3, "F", 0)) == [Transfer("hidden", 0, 1, (3,)), Transfer("skip", 0, 0, (1, 3))]
    assert ROUTES.received(Action(2, "F", 0)) == []


@pytest.mark.parametrize("kind", ["B", "I"])
def test_a_backward_receives_a_gradient_from_every_target_of_its_values(kind: str) -> None:
    backward = Action(0, "B", 2) if kind == "B" else Action(0, "I", 2)
    assert ROUTES.received(backward) == [Transfer("skip", 2, 1, (0,)), Transfer("skip", 2, 3, (0,))]


def test_no_gradient_flows_over_an_edge_that_is_not_differentiable() -> None:
    assert ROUTES.sent(Action(1, "B", 0)) == [Transfer("skip", 0, 1, (0,))]


def test_weight_gradients_exchange_nothing() -> None:
    assert ROUTES.received(Action(1, "W", 0)) == [] == ROUTES.sent(Action(1, "W", 0))


def test_a_transfer_prints_what_moves_between_which_stages() -> None:
    assert str(Transfer("h", 3, 0, (1,))) == "h[3] 0->1"
    assert str(Transfer("h", 3, 0, (1, 3))) == "h[3] 0->1,3"
    assert str(Transfer("h", 3, 3, (0,))) == "gradient of h[3] 3->0"


TWO_RANKS = Routes([Edge("h", 0, (1, 2, 3, 4)), Edge("own", 1, (3,))], placement=(0, 1, 0, 1, 0))
"""Even stages on rank 0, odd ones on rank 1."""


def test_without_a_placement_every_stage_is_on_its_own_rank() -> None:
    multicast = Transfer("skip", 0, 0, (1, 3))
    assert ROUTES.source_rank(multicast) == 0
    assert ROUTES.target_ranks(multicast) == (1, 3)
    assert not ROUTES.stays(multicast)


def test_a_value_goes_once_to_each_other_rank_and_apart_from_that_to_readers_on_its_own() -> None:
    away, home = TWO_RANKS.sent(Action(0, "F", 7))
    assert (away, home) == (Transfer("h", 7, 0, (1, 3)), Transfer("h", 7, 0, (2, 4)))
    assert (TWO_RANKS.target_ranks(away), TWO_RANKS.stays(away)) == ((1,), False)
    assert (TWO_RANKS.target_ranks(home), TWO_RANKS.stays(home)) == ((0,), True)


def test_stages_of_one_rank_receive_the_same_message() -> None:
    assert TWO_RANKS.received(Action(1, "F", 0)) == [Transfer("h", 0, 0, (1, 3))]
    assert TWO_RANKS.received(Action(3, "F", 0)) == [Transfer("own", 0, 1, (3,)), Transfer("h", 0, 0, (1, 3))]


def test_every_reader_returns_its_own_gradient_also_within_a_rank() -> None:
    assert TWO_RANKS.received(Action(0, "B", 0)) == [Transfer("h", 0, reader, (0,)) for reader in (1, 2, 3, 4)]
    assert [TWO_RANKS.stays(t) for t in TWO_RANKS.received(Action(0, "B", 0))] == [False, True, False, True]


def test_passing_on_goes_from_rank_to_rank_in_the_order_of_the_stages() -> None:
    routes = Routes([Edge("h", 0, (1, 2, 4, 5))], placement=(0, 1, 2, 0, 1, 2))
    assert routes.target_ranks(Transfer("h", 0, 0, (1, 2, 4, 5))) == (1, 2)


@pytest.mark.parametrize(("source", "targets"), [(0, ()), (1, (1,)), (0, (3, 1)), (1, (0, 2)), (3, (1, 0))])
def test_a_transfer_leads_to_later_stages_or_back_to_one(source: int, targets: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="a value's targets ascend, a gradient has one"):
        Transfer("h", 0, source, targets)


def test_a_chain_joins_neighbours() -> None:
    assert [(edge.source, edge.targets) for edge in chain(3)] == [(0, (1,)), (1, (2,))]
    assert chain(1) == ()


@pytest.mark.parametrize("targets", [(), (1,), (0,), (3, 2), (2, 2)])
def test_an_edge_must_lead_to_later_stages_in_order(targets: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="ascend"):
        Edge("e", 1, targets)


def test_without_a_multicast_every_rank_gets_a_transfer_of_its_own() -> None:
    edge = Edge("h", 0, (1, 2, 3, 4, 5))
    placement = (0, 1, 0, 1, 2, 0)
    assert edge.targets_together(placement) == [(1, 3, 4), (2, 5)]
    assert replace(edge, multicast=False).targets_together(placement) == [(1, 3), (4,), (2, 5)]
