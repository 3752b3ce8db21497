"""Adapters of peft, and models of which parts are frozen, train as on one process, and move no gradient in vain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fxpar.world.launch import run_ranks
from tests.support.parity import SUBJECTS, Run, check_runs


@pytest.mark.parametrize(
    ("mesh", "subjects"),
    [
        ({"pipe": 2, "x": 2}, ["llama with adapters", "gpt2 with adapters"]),
        ({"z": 2}, ["llama with adapters"]),
        ({"pipe": 2, "z": 2}, ["gpt2 with adapters"]),
    ],
    ids=str,
)
def test_low_rank_adapters_of_peft_train_as_on_one_process(mesh: Mapping[str, int], subjects: Sequence[str]) -> None:
    runs = [Run(subject, mesh, 2, schedules=("1f1b",), filtered=True) for subject in subjects]
    run_ranks(2 ** len(mesh), check_runs, runs)


@pytest.mark.parametrize(
    ("subject", "num_crossing"),
    [("llama, embeddings frozen", 2), ("llama, first stage frozen", 0), ("llama, head trained alone", 0)],
)
def test_gradients_that_nothing_needs_are_neither_sent_nor_reduced(
    subject: str, num_crossing: int, tmp_path: Path
) -> None:
    """On two stages over z: `num_crossing` values between them have gradients, the residual and what its MLP is of."""
    run = Run(subject, {"pipe": 2, "z": 2}, 2, schedules=("1f1b",), filtered=True)
    run_ranks(4, check_runs, [run], environment={"FXPAR_DUMP": str(tmp_path)})
    first, second = tmp_path / "rank0", tmp_path / "rank2"
    (program,) = second.glob("*_program.txt")
    assert len(set(re.findall(r"^send gradient of (\w+)", program.read_text(), re.MULTILINE))) == num_crossing
    trained = {name: 4 * p.numel() for name, p in SUBJECTS[subject].build(2).named_parameters() if p.requires_grad}
    of_second = sum(
        size for name, size in trained.items() if re.match(r"model\.layers\.0\.mlp|model\.norm|lm_head", name)
    )
    assert [_reduced_bytes(first), _reduced_bytes(second)] == [sum(trained.values()) - of_second, of_second]


def _reduced_bytes(dump: Path) -> int:
    """The size of the gradients that a rank reduces over z in its graphs."""
    graphs = [path.read_text() for path in dump.glob("*_reduce_gradients.*")]
    return sum(int(size) for graph in graphs for size in re.findall(r"reduce_scatter over z, (\d+) bytes", graph))
