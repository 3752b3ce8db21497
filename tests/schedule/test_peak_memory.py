"""The memory of programs is what one counts by hand, and that of schedules what their papers say."""

import pytest

from fxpar.errors import MemoryBudgetError
from fxpar.schedule import (
    INTERLEAVED,
    MEMORY_HEADER,
    SCHEDULE_NAMES,
    Edge,
    RankMemory,
    Schedule,
    StageMemory,
    build_schedule,
    chain,
    check_memory,
    forward_only,
    lower,
    peak_in_flight,
    peak_memory,
)

H = Edge("h", 0, (1,))
FIRST = StageMemory(1000, 100, 200, saved_for_inputs=3, saved_for_weights=5, values={"h": 10}, gradients_of={"h": 20})
LAST = StageMemory(read={"h": 10}, returned={"h": 20}, saved_for_inputs=50, saved_for_weights=500, carried=7, results=1)


def _peaks(schedule: Schedule, *memory: StageMemory, edges: list[Edge], lookahead: int = 0) -> tuple[RankMemory, ...]:
    programs = lower(schedule, edges, lookahead)
    return peak_memory(programs, schedule, edges, dict(enumerate(memory)))


def _parts(peak: RankMemory) -> dict[str, int]:
    return {part: num_bytes for part, num_bytes in peak.parts.items() if num_bytes}


def test_two_stages_of_which_the_last_splits_its_backward() -> None:
    schedule = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1I0 1W0 1F1 1I1 1W1")
    first, last = _peaks(schedule, FIRST, LAST, edges=[H])
    # The gradient's buffer comes before what was sent is known to have arrived.
    assert (first.position, first.instruction) == (11, "post gradient of h[1] 1->0")
    assert _parts(first) == {
        "parameters": 1000,
        "gradients": 100,
        "optimizer": 200,
        "saved": 8,
        "made": 10,
        "received": 20,
    }
    assert (first.peak_bytes, first.saved_peak_bytes) == (1338, 8)
    # The first gradient is complete when the second value has come, which is before the second is made.
    assert last.instruction == "compute 1I1"
    assert _parts(last) == {"saved": 557, "made": 20, "results": 2}
    assert last.saved_peak_bytes == 557


def test_results_stay_to_the_end_and_buffers_are_taken_when_they_are_posted() -> None:
    schedule = build_schedule("gpipe", 2, 3)
    memory = StageMemory(values={"h": 1}), StageMemory(read={"h": 1}, results=100)
    late, early = (_peaks(schedule, *memory, edges=[H], lookahead=ahead)[1] for ahead in (0, 3))
    assert (late.instruction, _parts(late)) == ("compute 1F2", {"results": 300, "received": 1})
    assert (early.instruction, _parts(early)) == ("compute 1F2", {"results": 300, "received": 1})
    without = _peaks(schedule, StageMemory(), StageMemory(read={"h": 1}), edges=[H], lookahead=3)[1]
    assert (without.instruction, _parts(without)) == ("post h[2] 0->1", {"received": 3})


def test_a_value_that_is_read_and_saved_stays_where_it_was_received() -> None:
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1I0 1I1 1W0 1W1")
    read_only = _peaks(schedule, StageMemory(), StageMemory(read={"h": 10}), edges=[H])[1]
    assert (read_only.saved_peak_bytes, read_only.peak_bytes) == (0, 10)
    kept_until_w = StageMemory(read={"h": 10}, read_until={"h": "W"}, carried=1)
    kept_until_i = StageMemory(read={"h": 10}, read_until={"h": "I"}, carried=1)
    assert [_peaks(schedule, StageMemory(), m, edges=[H])[1].peak_bytes for m in (kept_until_w, kept_until_i)] == [
        22,
        21,
    ]


def test_a_value_that_is_sent_and_saved_is_counted_once() -> None:
    first = StageMemory(values={"h": 10}, values_until={"h": "W"})
    peak = _peaks(build_schedule("1f1b", 2, 2), first, StageMemory(), edges=[H])[0]
    assert (peak.peak_bytes, peak.saved_peak_bytes) == (20, 20)


def test_gradients_of_edges_that_are_carried_stay_until_the_weights() -> None:
    schedule = Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0")
    first = StageMemory(gradients_of={"h": 10}, gradients_of_until=frozenset({"h"}))
    last = StageMemory(returned={"h": 30}, returned_until=frozenset({"h"}))
    peaks = _peaks(schedule, first, last, edges=[H])
    assert [(peak.peak_bytes, peak.saved_peak_bytes) for peak in peaks] == [(10, 10), (30, 30)]


def test_what_an_action_takes_while_it_runs_is_taken_then_alone() -> None:
    stage = StageMemory(saved_for_inputs=10, working={"F": 5, "B": 2})
    (peak,) = _peaks(build_schedule("gpipe", 1, 2), stage, edges=[])
    assert (peak.instruction, _parts(peak)) == ("compute 0F1", {"saved": 20, "working": 5})


def test_gradients_are_there_from_the_first_backward_on_and_later_ones_beside_them() -> None:
    stage = StageMemory(gradients=100, terms=100, working={"F": 50, "B": 130})
    first, later = (_peaks(build_schedule("1f1b", 1, m), stage, edges=[])[0] for m in (1, 2))
    assert (first.instruction, _parts(first)) == ("compute 0B0", {"gradients": 100, "working": 30})
    assert (later.instruction, _parts(later)) == ("compute 0B1", {"gradients": 100, "working": 130})


def test_evaluation_saves_nothing() -> None:
    schedule = forward_only(build_schedule("1f1b", 2, 8))
    last = StageMemory(gradients=7, saved_for_inputs=10, read={"h": 1}, read_until={"h": "I"})
    peak = _peaks(schedule, StageMemory(), last, edges=[H])[1]
    assert (peak.peak_bytes, peak.saved_peak_bytes) == (1, 0)


def test_evaluation_by_the_graphs_of_training_takes_what_one_forward_saves_while_it_runs() -> None:
    stage = StageMemory(saved_for_inputs=10, saved_for_weights=3, results=1, working={"F": 5, "B": 90})
    (peak,) = _peaks(forward_only(build_schedule("1f1b", 1, 4)), stage.without_backward, edges=[])
    assert (peak.instruction, _parts(peak)) == ("compute 0F3", {"results": 4, "working": 18})


def test_what_evaluation_sends_is_kept_to_the_end_for_nothing_comes_back() -> None:
    schedule = forward_only(build_schedule("1f1b", 2, 8))
    assert _peaks(schedule, StageMemory(values={"h": 1}), StageMemory(), edges=[H])[0].peak_bytes == 8


def test_stages_of_one_rank_hand_values_over_and_share_what_they_receive() -> None:
    schedule = build_schedule(INTERLEAVED, 4, 1, num_ranks=2)
    edges = [Edge("own", 0, (2,)), Edge("shared", 0, (1, 3))]
    memory = (
        StageMemory(values={"own": 10, "shared": 100}),
        StageMemory(read={"shared": 100}, read_until={"shared": "I"}),
        StageMemory(read={"own": 10}, read_until={"own": "I"}),
        StageMemory(read={"shared": 100}),
    )
    even, odd = _peaks(schedule, *memory, edges=edges)
    assert (even.peak_bytes, even.saved_peak_bytes) == (110, 10)
    assert (odd.peak_bytes, odd.saved_peak_bytes) == (100, 100)


def test_saved_activations_are_those_in_flight() -> None:
    for name in SCHEDULE_NAMES:
        schedule = build_schedule(name, 4, 16)
        memory = [StageMemory(saved_for_weights=10)] * 4
        peaks = _peaks(schedule, *memory, edges=list(chain(4)))
        assert tuple(peak.saved_peak_bytes for peak in peaks) == tuple(10 * n for n in peak_in_flight(schedule)), name


def test_eager_keeps_as_many_more_activations_as_there_are_later_stages() -> None:
    for num_stages in range(1, 9):
        memory = [StageMemory(parameters=1000, saved_for_inputs=1)] * num_stages
        edges = list(chain(num_stages))
        eager, lazy = (
            _peaks(build_schedule(name, num_stages, 32), *memory, edges=edges) for name in ("eager-1f1b", "1f1b")
        )
        more = [a.peak_bytes - b.peak_bytes for a, b in zip(eager, lazy, strict=True)]
        assert more == [num_stages - stage for stage in range(1, num_stages + 1)]


@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name != "gpipe"])
def test_memory_does_not_grow_with_the_microbatches(name: str) -> None:
    edges = [*chain(4), Edge("shared", 0, (1, 2, 3)), Edge("mask", 0, (2, 3), differentiable=False)]
    sizes = dict.fromkeys([edge.name for edge in edges], 10)
    stage = StageMemory(
        saved_for_inputs=3,
        saved_for_weights=5,
        carried=7 if "I" in str(build_schedule(name, 4, 1)) else 0,
        values=sizes,
        gradients_of=sizes,
        read=sizes,
        returned=sizes,
        values_until={"out1": "W", "shared": "I"},
        read_until={"out0": "I", "mask": "W"},
        gradients_of_until=frozenset({"out0", "shared"}),
        returned_until=frozenset({"out0", "out2"}),
    )
    few, many = (_peaks(build_schedule(name, 4, m), *[stage] * 4, edges=edges, lookahead=2) for m in (24, 48))
    assert [peak.saved_peak_bytes for peak in few] == [peak.saved_peak_bytes for peak in many]
    assert [peak.peak_bytes for peak in few] == [peak.peak_bytes for peak in many]


def test_splitting_the_backward_frees_what_only_input_gradients_need() -> None:
    stage = StageMemory(saved_for_inputs=10, saved_for_weights=1)
    schedule = Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1")
    assert _peaks(schedule, stage, edges=[])[0].peak_bytes == 12


def test_peaks_print_as_a_table() -> None:
    peaks = _peaks(build_schedule("1f1b", 1, 1), StageMemory(parameters=3 * 2**20, saved_for_inputs=2**19), edges=[])
    header, row = MEMORY_HEADER, str(peaks[0])
    titles = "rank peak MiB peak saved parameters gradients optimizer saved received made results working peak at"
    assert " ".join(header.split()) == titles
    assert " ".join(row.split()) == "0 3.5 0.5 3.0 0.0 0.0 0.5 0.0 0.0 0.0 0.0 compute 0F0"
    assert header.index("  peak at") == row.index("  compute 0F0")


def test_a_program_over_its_budget_is_refused_with_where_and_what_for() -> None:
    memory = [StageMemory(parameters=2**20, saved_for_inputs=2**20)] * 2
    peaks = _peaks(build_schedule("eager-1f1b", 2, 4), *memory, edges=list(chain(2)))
    check_memory(peaks, 4 * 2**20)
    with pytest.raises(MemoryBudgetError) as caught:
        check_memory(peaks, 4 * 2**20 - 1)
    assert str(caught.value) == (
        "rank 0, instruction 6: compute 0F2: 4.0 MiB are in memory there: expected at most 4.0 MiB. In MiB: "
        'parameters 1.0, saved 3.0. Fewer microbatches in flight ("1f1b"), more stages, smaller microbatches or more '
        "shards need less"
    )
