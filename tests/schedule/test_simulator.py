"""The simulator returns the figures that are known of the named schedules."""

import pytest

from fxpar.errors import InvalidCostsError, InvalidScheduleError
from fxpar.schedule import (
    DELAYED,
    INTERLEAVED,
    SCHEDULE_NAMES,
    Costs,
    Edge,
    Kind,
    Schedule,
    Timeline,
    TransferCost,
    build_schedule,
    chain,
    forward_only,
    lower,
    simulate,
    uniform_costs,
)

COMPUTE = "compute"
WHOLE = ("gpipe", "1f1b", "eager-1f1b")


def _run(
    schedule: Schedule,
    edges: tuple[Edge, ...],
    compute: dict[Kind, list[float]],
    value: float = 0.0,
    gradient: float = 0.0,
) -> Timeline:
    costs = uniform_costs(schedule.placement, edges, compute, value, gradient)
    return simulate(lower(schedule, edges), costs)


def _times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {span.name: (span.begin_us, span.end_us) for span in timeline.spans if span.lane == COMPUTE}


def _split(num_stages: int, forward: float, inputs: float, weights: float) -> dict[Kind, list[float]]:
    times: dict[Kind, float] = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    return {kind: [time] * num_stages for kind, time in times.items()}


def _makespan(name: str, num_stages: int, num_microbatches: int, backward: float, transfer: float) -> float:
    """Ticks of a step whose forwards take 1, backwards `backward`, and transfers either way `transfer`."""
    schedule = build_schedule(name, num_stages, num_microbatches)
    times = _split(num_stages, 1.0, backward / 2, backward / 2)
    return _run(schedule, chain(num_stages), times, transfer, transfer).makespan_us


@pytest.mark.parametrize("name", WHOLE)
def test_with_free_communication_the_order_does_not_matter(name: str) -> None:
    assert _makespan(name, 4, 8, backward=1, transfer=0) == 22


@pytest.mark.parametrize("name", WHOLE)
def test_without_communication_the_bubble_is_the_way_through_all_stages(name: str) -> None:
    for num_stages in range(1, 9):
        timeline = _run(build_schedule(name, num_stages, 16), chain(num_stages), _split(num_stages, 1, 1, 1))
        assert timeline.makespan_us == 3 * (16 + num_stages - 1)
        assert timeline.bubble_share == pytest.approx((num_stages - 1) / (16 + num_stages - 1))
        assert timeline.busy_us == dict.fromkeys(range(num_stages), 3 * 16)


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
    more = 2 * num_stages * (2 * num_stages - 1)  # whole rounds of either schedule
    for name, expected in periods.items():
        found = _makespan(name, num_stages, 40 + more, 2, transfer) - _makespan(name, num_stages, 40, 2, transfer)
        assert found == pytest.approx(expected * more, abs=1), name


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (2, 2, 1), (3, 4, 2), (3, 4, 1)])
def test_zero_bubble_schedules_leave_the_bubbles_of_their_paper(forward: int, inputs: int, weights: int) -> None:
    """Qi et al., Zero Bubble, table 2. H2 has no bubble, but ranks begin and end their steps one after another."""
    for num_stages in range(1, 9):
        for num_microbatches in (max(1, 2 * num_stages - 1), 24):
            for name, hidden in (("zb-h1", weights), ("zb-h2", 2 * weights)):
                schedule = build_schedule(name, num_stages, num_microbatches)
                timeline = _run(schedule, chain(num_stages), _split(num_stages, forward, inputs, weights))
                expected = (num_stages - 1) * (forward + inputs - hidden)
                assert max(_idle_within(timeline)) == expected, (name, num_stages, num_microbatches)


def _idle_within(timeline: Timeline) -> list[float]:
    """By rank, how long it does not compute between its own first and last action."""
    idle = []
    for rank, busy_us in timeline.busy_us.items():
        times = [(span.begin_us, span.end_us) for span in timeline.spans if (span.rank, span.lane) == (rank, COMPUTE)]
        idle.append(max(end for _, end in times) - min(begin for begin, _ in times) - busy_us)
    return idle


@pytest.mark.parametrize("transfer", [0.0, 0.25, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("weights", [0.5, 1.0, 1.5])
def test_delaying_weight_gradients_never_costs_time(transfer: float, weights: float) -> None:
    for num_stages in (1, 2, 3, 5, 8):
        for num_microbatches in (1, 2, num_stages, 20):
            times = _split(num_stages, 1.0, 1.0, weights)
            costs = uniform_costs(range(num_stages), chain(num_stages), times, transfer, transfer)
            delays = costs.weight_delays(num_microbatches)
            schedules = (
                build_schedule("eager-1f1b", num_stages, num_microbatches),
                build_schedule(DELAYED, num_stages, num_microbatches, delays=delays),
            )
            whole, delayed = (simulate(lower(each, chain(num_stages)), costs).makespan_us for each in schedules)
            assert delayed <= whole, (num_stages, num_microbatches)


@pytest.mark.parametrize("per_rank", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(per_rank: int) -> None:
    """Narayanan et al., Megatron-LM, section 2.2."""
    for num_ranks in (1, 2, 3, 4, 6, 8):
        for num_microbatches in (num_ranks, 2 * num_ranks, 4 * num_ranks):
            num_stages = num_ranks * per_rank
            schedule = build_schedule(INTERLEAVED, num_stages, num_microbatches, num_ranks=num_ranks)
            times: dict[Kind, list[float]] = {"F": [4 / per_rank] * num_stages, "B": [8 / per_rank] * num_stages}
            makespan = _run(schedule, chain(num_stages), times).makespan_us
            assert makespan == 12 * num_microbatches + 12 * (num_ranks - 1) / per_rank, (num_ranks, num_microbatches)


def test_an_action_starts_when_its_rank_is_free_and_its_value_has_arrived() -> None:
    timeline = _run(Schedule.parse("0F0 0F1\n1F0 1F1"), chain(2), {"F": [1, 5]}, value=2)
    assert _times(timeline) == {"0F0": (0, 1), "0F1": (1, 2), "1F0": (3, 8), "1F1": (8, 13)}


def test_waits_and_messages_are_in_the_timeline() -> None:
    timeline = _run(Schedule.parse("0F0 0F1\n1F0 1F1"), chain(2), {"F": [1, 5]}, value=2)
    others = [(s.rank, s.lane, s.name, s.begin_us, s.end_us) for s in timeline.spans if s.lane != COMPUTE]
    assert others == [
        (0, "sends", "out0[0] 0->1", 1, 3),
        (0, "sends", "out0[1] 0->1", 3, 5),
        (1, "wait", "out0[0] 0->1", 0, 3),
    ]


def test_a_link_moves_one_transfer_after_another() -> None:
    schedule = forward_only(build_schedule("gpipe", 2, 3))
    assert _run(schedule, chain(2), {"F": [1, 1]}, value=4).makespan_us == 1 + 3 * 4 + 1


def test_a_skip_connection_can_be_what_a_stage_waits_for() -> None:
    schedule = forward_only(build_schedule("gpipe", 3, 1))
    timeline = _run(schedule, (Edge("skip", 0, (2,)),), {"F": [1, 1, 1]}, value=3)
    assert _times(timeline) == {"0F0": (0, 1), "1F0": (0, 1), "2F0": (4, 5)}


def test_a_multicast_reaches_all_its_targets_at_once() -> None:
    schedule = forward_only(build_schedule("gpipe", 4, 1))
    timeline = _run(schedule, (Edge("skip", 0, (1, 3)),), {"F": [1, 1, 1, 1]}, value=3)
    assert [_times(timeline)[f"{stage}F0"][0] for stage in range(4)] == [0, 4, 0, 4]


def test_a_multicast_takes_every_link_that_it_passes_on_over() -> None:
    schedule = forward_only(build_schedule("gpipe", 3, 2))
    edges = Edge("skip", 0, (1, 2)), Edge("hidden", 1, (2,))
    times = _times(_run(schedule, edges, {"F": [1, 0, 1]}, value=3))
    assert times["1F0"] == (4, 4)
    # From 4 to 7 stage 1 passes the next microbatch on, before it sends what it made itself.
    assert times["2F0"] == (10, 11)


def test_links_serve_what_was_made_first() -> None:
    schedule = forward_only(build_schedule("gpipe", 3, 4))
    edges = Edge("skip", 0, (1, 2)), Edge("early", 1, (2,))
    assert _times(_run(schedule, edges, {"F": [5, 1, 1]}, value=1))["2F0"] == (8, 9)


def test_forward_and_backward_transfers_have_their_own_times() -> None:
    timeline = _run(build_schedule("1f1b", 2, 1), chain(2), {"F": [1, 1], "B": [1, 1]}, 10, 100)
    assert timeline.makespan_us == 1 + 10 + 1 + 1 + 100 + 1


def test_a_message_starts_when_its_receiver_has_posted() -> None:
    schedule = forward_only(build_schedule("gpipe", 2, 3))
    costs = uniform_costs((0, 1), chain(2), {"F": [1, 5]}, 3)
    late = simulate(lower(schedule, chain(2), lookahead=0), costs)
    assert _times(late)["1F1"] == (9 + 3, 9 + 3 + 5), "posted at 9, when the forward before it has ended"
    assert _times(simulate(lower(schedule, chain(2)), costs))["1F1"] == (9, 14)


def test_a_multicast_waits_for_those_who_pass_it_on_and_for_no_others() -> None:
    edges = (Edge("skip", 0, (1, 2)),)
    for slow, begins in ((1, {"1F1": 13, "2F1": 13}), (2, {"1F1": 4, "2F1": 13})):
        times: dict[Kind, list[float]] = {"F": [1.0, 1.0, 1.0]}
        times["F"][slow] = 10.0
        programs = lower(forward_only(build_schedule("gpipe", 3, 2)), edges, lookahead=0)
        found = _times(simulate(programs, uniform_costs(range(3), edges, times, 1)))
        assert {name: found[name][0] for name in begins} == begins, f"stage {slow} posts when it has ended, at 12"


def test_what_stays_on_its_rank_takes_no_time() -> None:
    schedule = Schedule.parse("0F0 1F0")
    assert _run(schedule, chain(2), {"F": [1, 1]}, value=7).makespan_us == 2


def test_a_value_whose_layout_changes_on_its_rank_takes_its_time() -> None:
    schedule = Schedule.parse("0F0 1F0")
    costs = Costs((0, 0), chain(2), {0: {"F": 1}, 1: {"F": 1}}, {("out0", 0, (1,)): TransferCost(7.0)})
    assert simulate(lower(schedule, chain(2)), costs).makespan_us == 9


def _from_one_host(first_us: float, second_us: float) -> dict[str, tuple[float, float]]:
    """Stage 0 sends to both others, whose hosts receive alone; each transfer takes 1 besides what links take."""
    edges = Edge("a", 0, (1,)), Edge("b", 0, (2,))
    transfers = {
        ("a", 0, (1,)): TransferCost(first_us + 1, {"host 0 sends": first_us, "host 1 receives": first_us}),
        ("b", 0, (2,)): TransferCost(second_us + 1, {"host 0 sends": second_us, "host 2 receives": second_us}),
    }
    costs = Costs((0, 1, 2), edges, {key: {"F": 1.0} for key in range(3)}, transfers)
    return _times(simulate(lower(forward_only(build_schedule("gpipe", 3, 1)), edges), costs))


def test_transfers_to_different_hosts_share_an_interface_fairly() -> None:
    assert _from_one_host(3, 3) == {"0F0": (0, 1), "1F0": (1 + 6 + 1, 9), "2F0": (1 + 6 + 1, 9)}


def test_what_is_left_of_a_transfer_has_the_interface_for_itself_when_the_other_has_passed() -> None:
    assert _from_one_host(2, 5) == {"0F0": (0, 1), "1F0": (1 + 4 + 1, 7), "2F0": (1 + 7 + 1, 10)}


def test_a_transfer_that_uses_half_a_link_leaves_the_other_half() -> None:
    edges = Edge("a", 0, (2,)), Edge("b", 1, (2,))
    transfers = {
        ("a", 0, (2,)): TransferCost(4.0, {"host 0 sends": 4.0, "host 2 receives": 2.0}),
        ("b", 1, (2,)): TransferCost(4.0, {"host 1 sends": 4.0, "host 2 receives": 2.0}),
    }
    costs = Costs((0, 1, 2), edges, {key: {"F": 1.0} for key in range(3)}, transfers)
    times = _times(simulate(lower(forward_only(build_schedule("gpipe", 3, 1)), edges), costs))
    assert times["2F0"] == (1 + 4, 6)


def test_values_under_way_slow_down_the_gradients_that_others_wait_for() -> None:
    """A middle stage sends and receives for 4 per microbatch, and computes for 3.

    Served one after another, its messages would take 4. Values that are sent ahead share the interfaces with gradients.
    """
    costs = {
        (f"out{edge}", *ends): TransferCost(2.0, {f"{ends[0]} sends": 2.0, f"{ends[1][0]} receives": 2.0})
        for edge in range(3)
        for ends in ((edge, (edge + 1,)), (edge + 1, (edge,)))
    }
    compute: dict[int, dict[Kind, float]] = {stage: {"F": 1.0, "I": 1.0, "W": 1.0} for stage in range(4)}
    step = Costs((0, 1, 2, 3), chain(4), compute, costs)
    few, many = (simulate(lower(build_schedule("eager-1f1b", 4, m), chain(4)), step).makespan_us for m in (40, 80))
    assert (many - few) / 40 == pytest.approx(4.5)


def test_the_cost_of_a_transfer_that_nobody_gave_is_missed_by_name() -> None:
    costs = Costs((0, 1), chain(2), {key: {"F": 1.0} for key in range(2)}, {})
    with pytest.raises(InvalidCostsError, match=r"out0\[0\] 0->1"):
        simulate(lower(forward_only(build_schedule("gpipe", 2, 1)), chain(2)), costs)


def test_actions_that_wait_for_each_other_are_named() -> None:
    schedule = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(InvalidScheduleError, match="wait for each other") as caught:
        _run(schedule, chain(2), {"F": [1, 1], "B": [1, 1]})
    assert all(action in str(caught.value) for action in ("0B0", "0F1", "1F1", "1B0"))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule_computes_all_there_is_to_do(name: str) -> None:
    for num_stages in (1, 2, 3, 5, 8):
        for num_microbatches in (1, 2, 7, 32):
            schedule = build_schedule(name, num_stages, num_microbatches)
            timeline = _run(schedule, chain(num_stages), _split(num_stages, 1, 1, 1), 0.25, 0.5)
            assert timeline.busy_us == dict.fromkeys(range(num_stages), 3 * num_microbatches)
