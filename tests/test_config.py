"""Options come from the call first, then from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxpar.config import read_options
from fxpar.errors import InvalidOptionError, InvalidScheduleError, UnknownScheduleError
from fxpar.ir.overlap_options import NO_OVERLAP, Overlap
from fxpar.schedule import build_schedule, write_csv


@pytest.mark.parametrize("given", [None, {}, {"dump": None}])
def test_the_environment_says_where_to_dump_where_the_options_do_not(
    given: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FXPAR_DUMP", raising=False)
    assert read_options(given).dump is None
    monkeypatch.setenv("FXPAR_DUMP", "there")
    assert read_options(given).dump == Path("there")
    assert read_options({"dump": "here"}).dump == Path("here")


def test_a_schedule_is_kept_as_its_name_or_as_text(tmp_path: Path) -> None:
    schedule = build_schedule("1f1b", 1, 2)
    write_csv(schedule, tmp_path / "mine.csv")
    assert read_options({"schedule": "zb-h1"}).schedule == "zb-h1"
    for own in ("0F0 0B0 0F1 0B1", [["0F0", "0B0", "0F1", "0B1"]], tmp_path / "mine.csv", schedule):
        assert read_options({"schedule": own}).schedule == "0F0 0B0 0F1 0B1"


def test_overlap_is_all_or_none_or_some_of_the_rules() -> None:
    assert read_options({}).overlapping == Overlap()
    assert read_options({"overlap": False}).overlapping == NO_OVERLAP
    some = read_options({"overlap": ["all_gathers"], "gather_ahead_bytes": 8}).overlapping
    assert some == Overlap(frozenset({"all_gathers"}), 8)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"overlap": "all_gathers"}, InvalidOptionError, "True, False, or some of 'input_gradients'"),
        ({"overlap": ["all_reduces"]}, InvalidOptionError, "'all_gathers'"),
        ({"gather_ahead_bytes": -1}, InvalidOptionError, "a number of bytes, 0 or more"),
        ({"held_reductions": "all"}, InvalidOptionError, "a multiple of the largest reduction, 0 or more"),
        ({"fuse": "sometimes"}, InvalidOptionError, "'fuse' is 'sometimes': expected True, False or 'always'"),
        ({"schedule": "1f2b"}, UnknownScheduleError, "'1f2b'.*did you mean '1f1b'"),
        ({"schedule": [["0F0", "0F1", "0B1"]]}, InvalidScheduleError, "rank 0: 0B0 is missing"),
        ({"schedule": [["0F0", "0B0", "0B0"]]}, InvalidScheduleError, "action 2: 0B0 runs a second time"),
        ({"schedule": "0B0 0F0"}, InvalidScheduleError, "action 0: 0B0 runs before 0F0"),
        ({"schedule": "nowhere.csv"}, InvalidScheduleError, "nowhere.csv: expected a CSV file"),
        ({"timeline": 3}, InvalidOptionError, "'timeline' is 3: expected a directory"),
        ({"memory_bytes": -1}, InvalidOptionError, "'memory_bytes' is -1: expected a positive number of bytes"),
        ({"profile": "yes"}, InvalidOptionError, "'profile' is 'yes': expected True or False"),
    ],
)
def test_options_that_do_not_fit_are_refused(option: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_options(option)
