"""`fxpar simulate` prints what schedules come to, from flags or from files, and lays measured steps beside them."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fxpar.cli import main
from fxpar.schedule import Costs, StageMemory, Timeline, build_schedule, chain, uniform_costs, write_csv

SVG = "{http://www.w3.org/2000/svg}"
CHAIN = ["--stages", "4", "--microbatches", "8", "--forward", "1000", "--backward", "2000", "--transfer", "500"]
SPLIT = ["--input-gradients", "1000", "--weight-gradients", "1000"]


def _rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert main(["simulate", *arguments, "--json"]) == 0
    return {row["schedule"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def _recorded(folder: Path, num_stages: int = 2, num_ranks: int = 2, *, memory: bool = False) -> Path:
    placement = [stage % num_ranks for stage in range(num_stages)]
    edges = chain(num_stages)
    costs = uniform_costs(placement, edges, {"F": [1.0] * num_stages, "B": [2.0] * num_stages}, 0.5, 0.5)
    for stage, rank in enumerate(placement):
        figures = StageMemory(parameters=2**20, saved_for_inputs=2**20)
        own = Costs(
            costs.placement,
            edges,
            {stage: costs.compute_us[stage]},
            costs.transfers,
            6,
            {stage: figures} if memory else {},
        )
        (folder / f"rank{rank}").mkdir(exist_ok=True)
        own.save(folder / f"rank{rank}" / f"{stage:02d}_costs.json")
    return folder


def test_a_table_compares_all_schedules_with_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *CHAIN, *SPLIT]) == 0
    lines = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    table = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert list(table) == ["gpipe", "1f1b", "eager-1f1b", "eager-1f1b-delayed", "zb-h1", "zb-h2"]
    assert table["1f1b"] == ["41.000", "41.5%", "8.000", "4 3 2 1"]
    assert table["eager-1f1b"] == ["36.000", "33.3%", "3.000", "7 5 3 1"]


def test_json_has_the_raw_figures(capsys: pytest.CaptureFixture[str]) -> None:
    row = _rows(capsys, *CHAIN, "--schedule", "1f1b")["1f1b"]
    assert row["makespan_us"] == 41000
    assert row["bubble_share"] == pytest.approx(1 - 24 / 41)
    assert row["exposed_us"] == 41000 - 33000
    assert row["in_flight"] == [4, 3, 2, 1]
    assert row["peak_bytes"] == []


def test_schedules_whose_costs_are_not_given_are_left_out_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *CHAIN]) == 0
    shown = capsys.readouterr().out
    assert "left out: eager-1f1b-delayed, zb-h1, zb-h2; costs: stage 0: expected the time of W" in shown


def test_one_schedule_whose_costs_are_not_given_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give the times of both parts" in _refused(capsys, *CHAIN, "--schedule", "zb-h1")


def test_weight_gradients_are_delayed_by_the_costs(capsys: pytest.CaptureFixture[str]) -> None:
    row = _rows(capsys, *CHAIN, *SPLIT, "--schedule", "eager-1f1b-delayed")["eager-1f1b-delayed"]
    assert row["in_flight"] == [7, 6, 4, 3], "1, 1 and 2 more than eager-1f1b for 0.5, 1 and 1.5 ms on their way"


def test_times_may_differ_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    row = _rows(capsys, "--stages", "2", "--microbatches", "1", "--forward", "1,2", "--backward", "3,4")["1f1b"]
    assert row["makespan_us"] == 10
    assert row["busy_us"] == {"0": 4, "1": 6}


def test_stages_that_share_a_rank_compare_with_one_stage_of_their_work(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--stages", "8", "--ranks", "4", "--microbatches", "8", "--forward", "500", "--backward", "1000"]
    rows = _rows(capsys, *flags)
    assert rows["1f1b"]["makespan_us"] == 3000 * (8 + 3)
    assert rows["interleaved"]["makespan_us"] == 3000 * (8 + 1.5)


def test_costs_of_a_compile_come_from_the_files_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _rows(capsys, str(_recorded(tmp_path)))
    assert rows["gpipe"]["makespan_us"] == 3 * 6 + 3 + 1, "6 microbatches, as compiled"
    assert _rows(capsys, str(tmp_path), "--microbatches", "2")["gpipe"]["in_flight"] == [2, 2]


def test_where_the_memory_of_stages_is_known_ranks_have_a_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _recorded(tmp_path, memory=True)
    assert _rows(capsys, str(tmp_path))["1f1b"]["peak_bytes"] == [3 * 2**20, 2 * 2**20]
    main(["simulate", str(tmp_path), "--schedule", "1f1b"])
    assert "3.0 2.0" in capsys.readouterr().out


def test_of_stages_that_share_ranks_only_interleaving_can_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _recorded(tmp_path, 4, 2)
    assert list(_rows(capsys, str(tmp_path))) == ["interleaved"]
    assert "one stage per rank" in _refused(capsys, str(tmp_path), "--schedule", "1f1b")


@pytest.mark.parametrize("name", ["own.csv", "own.txt"])
def test_a_schedule_may_come_from_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = build_schedule("1f1b", 4, 8)
    if name.endswith(".csv"):
        write_csv(schedule, tmp_path / name)
    else:
        (tmp_path / name).write_text(str(schedule))
    (row,) = _rows(capsys, *CHAIN, "--schedule", str(tmp_path / name)).values()
    assert row["makespan_us"] == 41000


def test_a_schedule_that_cannot_run_is_refused_with_its_actions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.txt").write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    flags = ["--stages", "2", "--forward", "1", "--backward", "1", "--schedule", str(tmp_path / "own.txt")]
    assert "deadlock" in _refused(capsys, *flags)


def test_a_schedule_of_other_counts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.txt").write_text(str(build_schedule("1f1b", 2, 8)))
    assert "expected 4 stages on 4 pipe ranks" in _refused(capsys, *CHAIN, "--schedule", str(tmp_path / "own.txt"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--schedule", "1f2b"], "did you mean '1f1b'"),
        (["--schedule", "missing.csv"], "missing.csv"),
        (["--ranks", "3"], "give a multiple of 3 stages"),
        (["--forward", "1,2,3"], "expected one time of F or 4, found 3"),
        (["dump"], "found flags, too"),
    ],
)
def test_what_cannot_be_simulated_is_an_error_that_says_what_to_do(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problem in _refused(capsys, *CHAIN, *arguments)


def test_without_costs_the_error_shows_how_to_give_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--stages 4 --forward 1000 --backward 2000" in _refused(capsys)
    assert "give --microbatches" in _refused(capsys, "--stages", "2", "--forward", "1", "--backward", "1")


@pytest.mark.parametrize("flags", [["--stages", "0"], ["--forward", "-1"], ["--backward", "nan"], ["--transfer", "x"]])
def test_numbers_that_are_none_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *flags])
    assert f"argument {flags[0]}: invalid" in capsys.readouterr().err


def test_timelines_are_drawn_and_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace = tmp_path / "new" / "step.svg", tmp_path / "new" / "step.json"
    rows = _rows(capsys, *CHAIN, "--schedule", "1f1b", "--svg", str(svg), "--trace", str(trace))
    assert Timeline.load(trace).makespan_us == rows["1f1b"]["makespan_us"]
    texts = [text.text for text in ElementTree.parse(svg).iter(f"{SVG}text")]
    assert texts[0] == "1f1b: 4 stages on 4 ranks, 8 microbatches"
    assert "rank 3 compute" in texts


def test_a_measured_step_is_laid_beside_the_simulated_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, svg, both = tmp_path / "trace.json", tmp_path / "step.svg", tmp_path / "both.json"
    _rows(capsys, *CHAIN, "--schedule", "eager-1f1b", "--trace", str(trace))
    measured = Timeline.load(trace)
    parts = []
    for rank in measured.ranks:
        parts.append(str(tmp_path / f"{rank}.json"))
        Timeline(tuple(span for span in measured.spans if span.rank == rank)).save(parts[-1])
    flags = ["--schedule", "1f1b", "--svg", str(svg), "--trace", str(both), "--measured", *parts]
    row = _rows(capsys, *CHAIN, *flags)["1f1b"]
    assert (row["measured_us"], row["ratio"]) == (36000, pytest.approx(41 / 36))
    texts = [text.text for text in ElementTree.parse(svg).iter(f"{SVG}text")]
    lanes = [text for text in texts if text and text.startswith("rank 0 compute")]
    assert lanes == ["rank 0 compute 1f1b", "rank 0 compute measured"]
    names = {event["args"].get("name") for event in json.loads(both.read_text())["traceEvents"]}
    assert {"rank 0 1f1b", "rank 0 measured"} <= names
    main(["simulate", *CHAIN, "--schedule", "1f1b", "--measured", *parts])
    assert "1.139" in capsys.readouterr().out
