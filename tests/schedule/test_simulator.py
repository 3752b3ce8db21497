"""The simulator gives the figures that are known of the named schedules."""

import pytest

from fxpar.errors import InvalidScheduleError
from fxpar.schedule import (
    SCHEDULE_NAMES,
    Action,
    Edge,
    Kind,
    Schedule,
    build_schedule,
    chain,
    forward_only,
    simulate,
)


def _makespan(name: str, num_stages: int, num_microbatches: int, backward: float, transfer: float) -> float:
    """Ticks of a step whose forwards take 1, backwards `backward`, and transfers either way `transfer`."""
    compute: dict[Kind, list[float]] = {"F": [1.0] * num_stages, "B": [backward] * num_stages}
    schedule = build_schedule(name, num_stages, num_microbatches)
    return simulate(schedule, chain(num_stages), compute, transfer, transfer).makespan_ticks


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_with_free_communication_the_order_does_not_matter(name: str) -> None:
    assert _makespan(name, 4, 8, backward=1, transfer=0) == 22


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_without_communication_the_bubble_is_the_way_through_all_stages(name: str) -> None:
    for num_stages in range(1, 7):
        assert _makespan(name, num_stages, 16, backward=2, transfer=0) == 3 * (16 + num_stages - 1)


@pytest.mark.parametrize(("name", "ticks"), [("eager-1f1b", 36), ("1f1b", 41)])
def test_eager_hides_the_communication_that_1f1b_exposes(name: str, ticks: float) -> None:
    assert _makespan(name, 4, 8, backward=2, transfer=0.5) == ticks


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
@pytest.mark.parametrize("transfer", [0.25, 0.5, 0.75, 1.5])
def test_the_steady_state_has_the_period_of_the_formulas(num_stages: int, transfer: float) -> None:
    period, communication = 1.0 + 2.0, 2 * transfer
    periods = {
        "1f1b": period + communication * (num_stages - 1) / num_stages,
        "eager-1f1b": max(period, (num_stages * period + (num_stages - 1) * communication) / (2 * num_stages - 1)),
    }
    more = 8 * num_stages * (2 * num_stages - 1)  # whole rounds of either schedule
    for name, expected in periods.items():
        found = _makespan(name, num_stages, 40 + more, 2, transfer) - _makespan(name, num_stages, 40, 2, transfer)
        assert found == pytest.approx(expected * more, abs=1), name


def test_an_action_starts_when_its_rank_is_free_and_its_value_has_arrived() -> None:
    schedule = Schedule.parse("0F0 0F1\n1F0 1F1")
    timeline = simulate(schedule, chain(2), {"F": [1, 5]}, forward_transfer_ticks=2)
    assert timeline.spans == {
        Action(0, "F", 0): (0, 1),
        Action(0, "F", 1): (1, 2),
        Action(1, "F", 0): (3, 8),
        Action(1, "F", 1): (8, 13),
    }


def test_a_link_moves_one_transfer_after_another() -> None:
    schedule = forward_only(build_schedule("gpipe", 2, 3))
    assert simulate(schedule, chain(2), {"F": [1, 1]}, forward_transfer_ticks=4).makespan_ticks == 1 + 3 * 4 + 1


def test_a_skip_connection_can_be_what_a_stage_waits_for() -> None:
    schedule = forward_only(build_schedule("gpipe", 3, 1))
    edges = [Edge("skip", 0, (2,))]
    timeline = simulate(schedule, edges, {"F": [1, 1, 1]}, forward_transfer_ticks=3)
    assert timeline.spans[Action(1, "F", 0)] == (0, 1)
    assert timeline.spans[Action(2, "F", 0)] == (4, 5)


def test_a_multicast_reaches_all_its_targets_at_once() -> None:
    schedule = forward_only(build_schedule("gpipe", 4, 1))
    timeline = simulate(schedule, [Edge("skip", 0, (1, 3))], {"F": [1, 1, 1, 1]}, forward_transfer_ticks=3)
    assert [timeline.spans[Action(stage, "F", 0)][0] for stage in range(4)] == [0, 4, 0, 4]


def test_a_multicast_takes_every_link_that_it_passes_on_over() -> None:
    schedule = forward_only(build_schedule("gpipe", 3, 2))
    edges = [Edge("skip", 0, (1, 2)), Edge("hidden", 1, (2,))]
    timeline = simulate(schedule, edges, {"F": [1, 0, 1]}, forward_transfer_ticks=3)
    assert timeline.spans[Action(1, "F", 0)] == (4, 4)
    # From 4 to 7 stage 1 passes the next microbatch on, before it sends what it made itself.
    assert timeline.spans[Action(2, "F", 0)] == (10, 11)


def test_links_serve_what_was_made_first() -> None:
    schedule = forward_only(build_schedule("gpipe", 3, 4))
    edges = [Edge("skip", 0, (1, 2)), Edge("early", 1, (2,))]
    timeline = simulate(schedule, edges, {"F": [5, 1, 1]}, forward_transfer_ticks=1)
    assert timeline.spans[Action(2, "F", 0)] == (8, 9)


def test_forward_and_backward_transfers_have_their_own_times() -> None:
    schedule = build_schedule("1f1b", 2, 1)
    timeline = simulate(schedule, chain(2), {"F": [1, 1], "B": [1, 1]}, 10, 100)
    assert timeline.makespan_ticks == 1 + 10 + 1 + 1 + 100 + 1


def test_actions_that_wait_for_each_other_are_named() -> None:
    schedule = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(InvalidScheduleError, match="wait for each other") as caught:
        simulate(schedule, chain(2), {"F": [1, 1], "B": [1, 1]})
    assert all(action in str(caught.value) for action in ("0B0", "0F1", "1F1", "1B0"))
