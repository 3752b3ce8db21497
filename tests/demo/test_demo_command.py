"""`fxpar demo` starts as many processes as there may be, and returns their status; a test of the wheel runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fxpar.cli import main


@pytest.mark.parametrize(
    ("gpus", "flags", "processes"), [(0, [], 4), (2, [], 2), (8, [], 4), (8, ["--processes", "8"], 8)]
)
def test_there_are_four_processes_unless_there_are_fewer_gpus(
    gpus: int, flags: list[str], processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed.run, "main", launched.append)
    assert main(["demo", *flags, "--dump", str(tmp_path), "--", "--layers", "2"]) == 0
    ((_, _, number, program, *arguments),) = launched
    assert number == str(processes) and Path(program).is_file()
    assert arguments == ["--steps", "20", "--dump", str(tmp_path), "--report", f"{tmp_path}/demo.json", "--layers", "2"]


def test_a_process_that_fails_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> None:
        raise ChildFailedError("train_gpt.py", {0: ProcessFailure(0, 1, 1, "none")})

    monkeypatch.setattr(torch.distributed.run, "main", fail)
    assert main(["demo", "--dump", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "train_gpt.py FAILED" in shown.err and "has the losses" not in shown.out
