"""A second launch of a program finds what the first derived, and computes the same bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.derivations import note_derivations
from tests.support.small_models import hf_gpt2

MESH = {"pipe": 2, "x": 2}
ATEN = {"lowering": "aten"}


def train(microbatches: int = 2, hints: dict[str, Any] | None = None, **options: Any) -> tuple[list[str], list[str]]:
    """Two steps and an evaluation on this rank: digests of losses and gradients, and the derivations that ran."""
    derived = note_derivations()
    torch.manual_seed(0)
    model = hf_gpt2(dropout=0.1)
    ids = torch.randint(96, (8, 12))
    batch = {"input_ids": ids, "labels": ids}
    fxpar.distribute(model, fxpar.init_mesh(**MESH), layouts=hints, microbatches=microbatches, example_inputs=batch)
    step = torch.compile(model, backend="fxpar", options={**ATEN, **options})
    digests = []
    for _ in range(2):
        loss = step(**batch).loss
        loss.backward()
        digests.append(_digest([loss, *(p.grad.to_local() for p in model.parameters())]))
    with torch.no_grad():
        digests.append(_digest([step(**batch).loss]))
    return digests, derived


def _digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def launch(folder: Path, **kwargs: Any) -> tuple[list[list[str]], list[list[str]]]:
    """What the ranks of one launch computed, and what they derived; each launch lowers its graphs itself."""
    found = run_ranks(4, train, environment={"FXPAR_CACHE_DIR": str(folder)}, **kwargs)
    derivations = [[name for name in derived if name != "lower_stage"] for _, derived in found]
    return [digests for digests, _ in found], derivations


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A cache that one launch has filled, and what that launch computed."""
    folder = tmp_path_factory.mktemp("cache")
    results, derived = launch(folder)
    plans = sum(names.count("plan_stages") for names in derived)
    assert plans == 1, "training was planned once, by one rank, and evaluation not at all"
    assert all("divide_stage" in names for names in derived)
    return folder, results


def test_a_second_launch_derives_nothing_and_computes_the_same(first: tuple[Path, list[list[str]]]) -> None:
    folder, expected = first
    results, derived = launch(folder)
    assert results == expected
    assert derived == [[]] * 4


def test_damaged_entries_are_derived_again_by_all_ranks(first: tuple[Path, list[list[str]]], tmp_path: Path) -> None:
    folder, expected = first
    for number, file in enumerate(sorted(folder.iterdir())):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= number % 3 == 0
        (tmp_path / file.name).write_bytes(data)
    results, derived = launch(tmp_path)
    assert results == expected
    assert any(derived), "some rank's program, or a plan, was damaged"
    assert len({tuple(sorted(set(names) - {"plan_stages"})) for names in derived}) == 1
