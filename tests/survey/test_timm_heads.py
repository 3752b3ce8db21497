"""Models of timm are listed if timm can be imported, made small, and train on a mesh as on one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fxpar.survey.compare import comparable
from fxpar.survey.families import HEADS, Family
from fxpar.survey.run import survey

NAMES = list(HEADS["timm"].names())

with_timm = pytest.mark.skipif(not NAMES, reason="timm, or torchvision, which it imports, cannot be imported")


def test_nothing_is_listed_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert not list(HEADS["timm"].names())


@with_timm
def test_one_model_of_each_kind_is_listed() -> None:
    assert len(NAMES) == len(set(NAMES)) == 20


@with_timm
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "densenet121"])
def test_a_model_is_small_and_trains_alone(name: str) -> None:
    model, batch = comparable(Family(name, "timm"))
    assert model.training, "it draws no random numbers"
    assert sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    assert set(batch) == {"images", "labels"}


@with_timm
def test_a_model_trains_on_a_mesh(tmp_path: Path) -> None:
    (found,) = survey([Family("vit_tiny_patch16_224", "timm")], ["pipe=2 x x=2"], ["default"], tmp_path / "found.jsonl")
    assert found.verdict == "right", found.reason
    assert found.share < 0.4, "every rank holds about a quarter of the parameters"
