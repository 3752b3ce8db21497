"""The command `fxpar` runs benchmarks by name, and says by its exit status what became of them."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fxpar.bench import BENCHMARKS, Benchmark
from fxpar.bench.report import Report, Say, at_most
from fxpar.cli import main
from fxpar.errors import ClusterUnavailableError

COMMAND = str(Path(sys.executable).with_name("fxpar"))


def test_a_wrong_name_is_answered_with_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "stpe"])
    assert exit_.value.code == 2
    assert "invalid choice: 'stpe' (choose from 'step'" in capsys.readouterr().err


def test_no_command_is_an_error_that_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "usage: fxpar" in capsys.readouterr().err


def test_the_installed_command_explains_itself() -> None:
    shown = subprocess.run([COMMAND, "bench", "--help"], capture_output=True, text=True, check=True).stdout
    assert re.search(r"step +choosing layouts", shown)


def test_a_benchmark_explains_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "step", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "choosing layouts" in shown
    assert "--json" in shown
    assert "--check" in shown


def test_the_documentation_has_every_benchmark_in_every_mode() -> None:
    text = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text()
    for name, benchmark in BENCHMARKS.items():
        for flags in ("", *(f" --{mode}" for mode in benchmark.modes)):
            assert f"fxpar bench {name}{flags}" in text


@pytest.fixture
def missed_bar(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a benchmark that measures one thing in no time, and misses its bar."""
    benchmark = types.ModuleType("fxpar.bench.quick.run")
    report = Report([{"runs": 1}], [at_most("runs", 1, 0)])
    monkeypatch.setattr(benchmark, "run", lambda say: report, raising=False)
    monkeypatch.setitem(sys.modules, benchmark.__name__, benchmark)
    monkeypatch.setitem(BENCHMARKS, "quick", Benchmark("nothing much"))
    return "quick"


def test_json_is_one_object_and_check_fails_on_a_missed_bar(
    missed_bar: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", missed_bar, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"runs": 1}]
    assert main(["bench", missed_bar, "--json", "--check"]) == 1
    assert json.loads(capsys.readouterr().out)["bars"][0]["met"] is False


def test_without_json_a_benchmark_prints_tables(missed_bar: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", missed_bar]) == 0
    assert "runs, at most" in capsys.readouterr().out


def test_of_ranks_that_all_run_it_the_first_one_prints(
    missed_bar: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["bench", missed_bar, "--json"]) == 0
    assert main(["bench", missed_bar, "--check"]) == 1, "all ranks end alike"
    assert capsys.readouterr().out == ""


def test_what_users_can_mend_is_an_error_and_no_traceback(
    missed_bar: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(say: Say) -> Report:
        raise ClusterUnavailableError("there is none")

    monkeypatch.setattr(sys.modules["fxpar.bench.quick.run"], "run", run)
    assert main(["bench", missed_bar, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fxpar: expected to make network namespaces")
    assert "there is none" in shown.err
    assert shown.out == ""


@pytest.fixture
def with_modes(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a benchmark that tells in which mode it ran."""

    def run(say: Say, mode: str = "real") -> Report:
        return Report([{"mode": mode}], [])

    benchmark = types.ModuleType("fxpar.bench.modal.run")
    monkeypatch.setattr(benchmark, "run", run, raising=False)
    monkeypatch.setitem(sys.modules, benchmark.__name__, benchmark)
    monkeypatch.setitem(BENCHMARKS, "modal", Benchmark("modes", {"simulate": "by thought", "emulate": "by pretence"}))
    return "modal"


@pytest.mark.parametrize(("flags", "mode"), [([], "real"), (["--simulate"], "simulate"), (["--emulate"], "emulate")])
def test_a_flag_chooses_the_mode_of_a_benchmark(
    flags: list[str], mode: str, with_modes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", with_modes, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"mode": mode}]


def test_modes_exclude_each_other(with_modes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", with_modes, "--simulate", "--emulate"])
    assert "--emulate: not allowed with argument --simulate" in capsys.readouterr().err


def test_a_benchmark_has_no_modes_of_others(with_modes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "step", "--simulate"])
    assert "unrecognized arguments: --simulate" in capsys.readouterr().err
