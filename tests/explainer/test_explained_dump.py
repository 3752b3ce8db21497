"""`fxpar explain FOLDER` says of a dump what its report says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxpar.cli import main
from fxpar.hardware.cluster import cluster_named
from tests.support.imagined_dump import Imagined, dump_imagined


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    with torch.device("meta"):
        model, rows = Chain(), torch.zeros(8192, 512)
    dump_imagined(model, (rows,), Imagined({"pipe": 4}, cluster_named("dgx-a100"), 2, "1f1b", {}), folder)
    return folder


def test_it_shows_the_parts_of_the_step_and_what_limits_it(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(dump)]) == 0
    shown = capsys.readouterr().out
    assert "2 microbatches, 1f1b" in shown and "the step, predicted" in shown
    assert "Pipeline bubble" in shown and "Raise `microbatches`" in shown


def test_json_has_parts_that_add_up_to_the_step(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(dump), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts_us"].values()) == pytest.approx(found["step_us"])
    assert found["limits"][0]["kind"] == "bubble"
    assert found["measured_us"] is None


def test_a_folder_without_a_dump_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) != 0
    assert "step_facts.json" in capsys.readouterr().err
