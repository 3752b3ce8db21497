"""The terminal of rank 0 shows what is done, and keeps a line for each thing that is finished."""

from __future__ import annotations

import logging
import os
import re
import sys
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.progress.display import is_showing, say, showing, tell
from fxpar.progress.phases import phase
from fxpar.world.compute_once import compute_once
from fxpar.world.launch import run_ranks
from tests.support.terminal import Terminal


def work() -> None:
    """Something with phases, which prints."""
    with showing("distribute Model"):
        with phase("plan"), showing("within"), phase("trace_joint"):
            say("op 3 of 4")
        print("a warning", file=sys.stderr)
    tell("distributed Model")


def test_phases_are_shown_and_nothing_stays_but_what_was_told() -> None:
    with Terminal() as terminal:
        work()
    assert "distribute Model, plan, within, trace_joint, op 3 of 4" in terminal.written
    assert re.search(r"op 3 of 4 .*0:00:0", terminal.written), "the time since it began"
    assert terminal.screen == ["a warning", "fxpar: distributed Model"]


def test_a_phase_shows_what_its_outer_phases_said() -> None:
    with Terminal() as terminal, showing("bench"):
        say("round 1")
        with phase("capture"):
            say("half")
        say("round 2")
    assert "bench, round 1, capture" not in terminal.written, "one thing at a time"
    assert "bench, capture, half" in terminal.written and "bench, round 2" in terminal.written
    assert terminal.screen == []


def test_who_reads_the_log_reads_nothing_twice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fxpar"), Terminal() as terminal:
        tell("distributed Model")
    assert [record.getMessage() for record in caplog.records] == ["distributed Model"]
    assert terminal.screen == []


@pytest.mark.parametrize(("name", "value"), [("FXPAR_QUIET", "1"), ("RANK", "1")])
def test_quiet_programs_and_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with Terminal() as terminal:
        work()
    assert terminal.screen == ["a warning"] and "\x1b" not in terminal.written


def test_without_a_terminal_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with showing("distribute Model"):
        assert not is_showing()
    tell("distributed Model")
    assert capfd.readouterr().err == ""


class Model(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def train_at_a_terminal() -> tuple[list[str], str]:
    """What is left on this rank's screen, and all that was written."""
    os.environ["FXPAR_CACHE_DIR"] = ""  # no RANK: not every launcher sets it
    with Terminal() as terminal:
        model = Model()
        mesh = fxpar.init_mesh(pipe=2)
        fxpar.distribute(model, mesh, example_inputs=(torch.zeros(4, 4),), microbatches=2)
        step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
        step(torch.zeros(4, 4)).backward()
        with torch.no_grad():
            step(torch.zeros(4, 4))
    return [re.sub(r"[0-9.]+ s\b", "TIME", line) for line in terminal.screen], terminal.written


def test_a_model_that_trains_leaves_a_line_for_each_thing_on_one_rank() -> None:
    (screen, _), (other, written) = run_ranks(2, train_at_a_terminal, environment={"FXPAR_QUIET": "0"})
    assert screen == [
        "fxpar: distributed Model over pipe=2 in TIME",
        "fxpar: compiled the training step in TIME: the first of this model, microbatches of x: float32 (2, 4)",
        "fxpar: took the forwards of the training step for the evaluation in TIME: the first without gradients, "
        "microbatches of x: float32 (2, 4)",
    ]
    assert (other, written) == ([], "")


def derive_on_the_other_rank() -> str:
    """What the first rank shows while the other one derives."""
    rank = dist.get_rank()
    os.environ["RANK"] = str(rank)
    store = dist.distributed_c10d._get_default_store()

    def derive() -> int:
        with phase("plan_stages"):
            store.set("derives", "now")
            while not store.check(["is shown"]):
                with phase("trace_joint"):
                    pass
        return 7

    with Terminal() as terminal:

        def answer() -> None:
            terminal.wait_for("on another rank: plan_stages, trace_joint")
            store.set("is shown", "yes")

        if rank == 0:
            store.wait(["derives"])
            Thread(target=answer).start()
        with showing("distribute Model"):
            assert compute_once("a question", derive) == 7
    return terminal.written


def test_the_first_rank_shows_what_another_derives_for_it() -> None:
    shown, other = run_ranks(2, derive_on_the_other_rank, environment={"FXPAR_QUIET": "0"})
    assert "distribute Model, on another rank: plan_stages" in shown
    assert other == ""
