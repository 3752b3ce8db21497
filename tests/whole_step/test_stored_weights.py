"""Weights stored in shards over z: what each rank holds, and when they are gathered and their gradients reduced."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.config import read_options
from fxpar.errors import InvalidOptionError
from fxpar.ir.storage_options import Storage, storage_choices
from fxpar.world.launch import run_ranks
from tests.support.uneven_chain import UnevenChain, chain_batch

ROWS = 8


def _local(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor).to_local()


def hold_shards(with_example: bool) -> dict[str, tuple[int, ...]]:
    """One step on every rank; how many elements of each parameter, its gradient, and its moments are here."""
    mesh = fxpar.init_mesh(z=2)
    torch.manual_seed(0)
    model = UnevenChain()
    alone = copy.deepcopy(model)
    whole = chain_batch(2 * ROWS)
    mine = {name: value.chunk(2)[fxpar.batch_rank(mesh)] for name, value in whole.items()}
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=mine if with_example else None)
    model.load_state_dict(alone.state_dict())  # also from whole tensors
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.compile(model, backend="fxpar", options={"lowering": "aten"})(**mine)
    torch.testing.assert_close(loss, alone(**whole))
    loss.backward()
    optimizer.step()
    held = {}
    for name, parameter in model.named_parameters():
        tensors: list[Any] = [parameter]
        if parameter.grad is not None:
            tensors += [parameter.grad, *optimizer.state[parameter].values()]
        held[name] = tuple(_local(tensor).numel() for tensor in tensors if isinstance(tensor, DTensor))
    return held


@pytest.mark.parametrize("with_example", [True, False], ids=["captured", "by modules alone"])
def test_parameters_gradients_and_moments_are_shards(with_example: bool) -> None:
    ranks = run_ranks(2, hold_shards, with_example)
    sizes = {name: parameter.numel() for name, parameter in UnevenChain().named_parameters()}
    for name, size in sizes.items():
        counts = [held[name] for held in ranks]
        expected = 1 if name.startswith(("frozen", "unused")) else 4
        assert [len(count) for count in counts] == [expected, expected], name
        for own, other in zip(*counts, strict=True):
            assert own + other == size, f"{name}: {own} and {other} elements"
            assert abs(own - other) <= max(size // 3, 1), f"{name}: {own} and {other} elements"


def choose_by_memory(directory: Path) -> list[list[str]]:
    """Compile with less and less memory; of each, the dumped graphs of what is done once per step."""
    mesh = fxpar.init_mesh(z=2)
    model = _WithLoss(nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 768)))
    batch = torch.randn(4, 768)
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=(batch,))
    found, budget = [], math.inf
    for number in range(4):
        folder = directory / str(number)
        # What is gathered for a microbatch is gathered again for its backward: else it would save no memory.
        options = {"lowering": "aten", "dump": folder, "memory_bytes": budget, "gathered_bytes": 0}
        torch.compile(model, backend="fxpar", options=options)(batch).backward()
        dumped = {path.name.split(".")[0][3:]: path for path in (folder / f"rank{mesh.rank}").iterdir()}
        found.append(sorted({"gather_weights", "reduce_gradients"} & dumped.keys()))
        _, figures = dumped["memory"].read_text().splitlines()
        budget = 0.99 * float(figures.split()[1]) * 2**20
    return found


class _WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x).square().mean()
        return loss


def test_where_memory_is_short_gradients_are_reduced_and_weights_gathered_for_each_microbatch(tmp_path: Path) -> None:
    for found in run_ranks(2, choose_by_memory, tmp_path):
        assert found == [["gather_weights", "reduce_gradients"], ["gather_weights"], ["reduce_gradients"], []]


def test_what_is_left_open_goes_by_the_number_of_microbatches() -> None:
    assert storage_choices("auto", "auto", 1, 2) == [Storage(False, False)]
    assert storage_choices("auto", "auto", 4, 2)[0] == Storage(True, True)
    assert set(storage_choices("auto", "auto", 4, 2)) == {Storage(a, b) for a in (False, True) for b in (False, True)}
    assert storage_choices("step", "microbatch", 1, 2) == [Storage(True, False)]
    assert storage_choices("microbatch", "auto", 4, 2) == [Storage(False, True), Storage(False, False)]
    assert storage_choices("step", "step", 4, 1) == [Storage(False, False)], "nothing is stored in shards"


@pytest.mark.parametrize("name", ["gather_weights", "reduce_gradients"])
def test_other_times_are_refused(name: str) -> None:
    assert getattr(read_options({name: "step"}), name) == "step"
    with pytest.raises(InvalidOptionError, match=f"'{name}' is 'often': expected 'step' or 'microbatch' or 'auto'"):
        read_options({name: "often"})
