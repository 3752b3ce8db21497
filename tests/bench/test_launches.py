"""`fxpar bench compile` measures whole launches, phase by phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpar._torch.compiler import inductor_cache
from fxpar.bench.compile.run import PROGRAMS, Launch, Program, _bars, _rows, launch


def test_a_launch_is_measured_from_its_start_to_its_evaluation(tmp_path: Path) -> None:
    (tmp_path / "inductor").symlink_to(inductor_cache())  # an empty one would only add the time of the C++ compiler
    found = launch(Program(layers=1), tmp_path)
    assert list(found.phases) == ["import_torch", "first_step", "second_step", "evaluation"]
    assert min(found.phases.values()) > 0
    assert found.seconds + found.phases["evaluation"] == sum(found.phases.values())
    assert found.peak_bytes > 10**8


def test_ratios_are_of_medians_or_of_launches_in_one_round() -> None:
    seconds = {
        "fxpar": (30.0, 20.0, 22.0),
        "torch.compile": (20.0, 40.0, 22.0),
        "fxpar, 48 layers": (44.0, 40.0, 60.0),
        "fxpar, dumping": (45.0, 20.0, 33.0),
    }
    phases = ("import_torch", "init_mesh", "distribute", "first_step", "second_step")
    launches = {
        (name, caches): [
            Launch({**dict.fromkeys(phases, total / 5), "evaluation": 1.0}, 0.0, 10**9) for total in seconds[name]
        ]
        for name in PROGRAMS
        for caches in ("cold", "warm")
    }
    bars = {bar.name: bar for bar in _bars(launches)}
    assert bars["cold launch to second step on 4 ranks / torch.compile's in one process, at most"].value == 1.0
    assert bars["warm launch to second step, seconds, at most"].value == 22.0
    assert bars["cold launch with 48 layers / with 12, at most"].value == 2.0
    assert bars["cold compilation with a dump / without, at most"].value == pytest.approx(1.5)
    assert bars["warm first evaluation, seconds, at most"].met
    rows = list(_rows(launches))
    assert [(row["program"], row["caches"], row["ranks"]) for row in rows[:3]] == [
        ("fxpar", "cold", 4),
        ("fxpar", "warm", 4),
        ("torch.compile", "cold", 1),
    ]
    assert rows[0]["to_second_step_s"] == 22.0
