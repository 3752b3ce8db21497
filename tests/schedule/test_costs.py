"""Costs answer for computations and transfers, and ranks' own parts of them come back whole from files."""

from dataclasses import replace
from pathlib import Path

import pytest

from fxpar.errors import InvalidCostsError
from fxpar.schedule import Costs, Edge, Kind, StageMemory, Transfer, TransferCost, build_schedule, chain, uniform_costs

WHOLE = Costs(
    (0, 1),
    (Edge("out0", 0, (1,)), Edge("mask", 0, (1,), differentiable=False)),
    {0: {"F": 10.0, "B": 20.0}, 1: {"F": 11.0, "I": 12.0, "W": 13.0}},
    {
        ("out0", 0, (1,)): TransferCost(5.0, {"host 0 sends": 4.0, "host 1 receives": 3.5}),
        ("mask", 0, (1,)): TransferCost(0.5, {}),
        ("out0", 1, (0,)): TransferCost(15.0, {"host 1 sends": 4.0}),
    },
    8,
    {
        0: StageMemory(parameters=100, values={"out0": 7}, values_until={"out0": "W"}),
        1: StageMemory(carried=3, returned={"out0": 7}, returned_until=frozenset({"out0"}), working={"F": 2}),
    },
)


def _part(stage: int) -> Costs:
    return replace(WHOLE, compute_us={stage: WHOLE.compute_us[stage]}, memory={stage: WHOLE.memory[stage]})


def test_a_whole_backward_takes_as_long_as_its_parts() -> None:
    assert WHOLE.action_us(1, "B") == 25.0
    assert WHOLE.action_us(0, "B") == 20.0


@pytest.mark.parametrize(
    ("stage", "kind", "found"), [(0, "W", "found that of F, B; give the times of both"), (2, "F", "every stage")]
)
def test_a_time_that_is_not_known_is_an_error_that_says_what_is(stage: int, kind: Kind, found: str) -> None:
    with pytest.raises(InvalidCostsError, match=f"stage {stage}: expected the time of {kind}.*{found}"):
        WHOLE.action_us(stage, kind)


def test_a_transfer_without_a_cost_is_an_error_unless_it_stays() -> None:
    unknown = Transfer("skip", 3, 0, (1,))
    assert WHOLE.transfer(unknown, stays=True) == TransferCost(0.0)
    with pytest.raises(InvalidCostsError, match=r"skip\[3\] 0->1"):
        WHOLE.transfer(unknown)


def test_files_give_back_what_was_saved(tmp_path: Path) -> None:
    WHOLE.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == WHOLE
    assert Costs.load(tmp_path) == WHOLE


def test_what_ranks_wrote_of_their_own_stages_is_whole_again(tmp_path: Path) -> None:
    for stage in (0, 1):
        (tmp_path / f"rank{stage}").mkdir()
        _part(stage).save(tmp_path / f"rank{stage}" / "12_costs.json")
    assert Costs.load(tmp_path) == WHOLE


def test_of_ranks_that_share_a_stage_the_slowest_and_the_fullest_count() -> None:
    other = replace(WHOLE, compute_us={0: {"F": 12.0, "B": 18.0}}, memory={0: StageMemory(parameters=101)})
    merged = Costs.merge([_part(0), other])
    assert merged.compute_us == {0: {"F": 12.0, "B": 20.0}}
    assert merged.memory[0].parameters == 101


def test_parts_of_different_compiles_are_refused() -> None:
    with pytest.raises(InvalidCostsError, match="one compile"):
        Costs.merge([_part(0), replace(_part(1), num_microbatches=9)])


def test_a_folder_without_costs_is_an_error_that_says_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(InvalidCostsError, match=r'options={"dump": FOLDER}'):
        Costs.load(tmp_path)
    with pytest.raises(InvalidCostsError, match="No such file"):
        Costs.load(tmp_path / "missing.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"placement": [0], "edges": [{"nam": 1}]}'])
def test_a_file_that_is_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(InvalidCostsError, match="not what this release writes"):
        Costs.load(tmp_path)


def test_weight_gradients_are_delayed_by_what_covers_the_gradients_way_back() -> None:
    times: dict[Kind, list[float]] = {"F": [1] * 4, "I": [1] * 4, "W": [2] * 4}
    assert uniform_costs(range(4), chain(4), times, 0, 1.5).weight_delays(8) == (0, 1, 2, 3)
    assert uniform_costs(range(4), chain(4), times, 9, 0).weight_delays(8) == (0, 0, 0, 0)


def test_uniform_costs_know_what_leaves_its_rank() -> None:
    schedule = build_schedule("interleaved", 4, 4, num_ranks=2)
    edges = Edge("a", 0, (1, 2)), Edge("b", 1, (3,))
    costs = uniform_costs(schedule.placement, edges, {"F": [1] * 4}, 3, 4)
    assert costs.transfers == {
        ("a", 0, (1,)): TransferCost(3, {"rank 0 to 1": 3}),
        ("a", 1, (0,)): TransferCost(4, {"rank 1 to 0": 4}),
    }
