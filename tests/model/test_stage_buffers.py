"""Buffers that a forward changes belong to its stage; all batch shards have those of the first one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fxpar.distribute_model import distribute
from fxpar.errors import SharedBufferError
from fxpar.world.launch import run_ranks
from tests.model.train_with_buffers import Normed, rows_of, seeded, statistics_of_the_first_shard, train_save_and_load
from tests.support.fake_mesh import fake_mesh

STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def test_trained_statistics_are_saved_by_their_stage_and_load_on_any_mesh_and_in_one_process(tmp_path: Path) -> None:
    expected = statistics_of_the_first_shard()
    of_stages = [{f"blocks.{stage}.1.{name}" for name in STATISTICS} for stage in range(2)]
    for rank, (trained, loaded) in enumerate(run_ranks(4, train_save_and_load, tmp_path)):
        for state in trained:
            buffers = {name for name in state if name.rpartition(".")[2] in STATISTICS}
            assert buffers == of_stages[rank // 2], f"rank {rank}"
            assert "table" in state and "unsaved" not in state
            _assert_equal(state, {name: expected[name] for name in state}, f"rank {rank}, trained")
        assert set(loaded) == set(expected)
        _assert_equal(loaded, expected, f"rank {rank}, loaded")
    for known in (True, False):
        dcp_to_torch_save(tmp_path / str(known), tmp_path / "whole.pt")
        alone = Normed()
        alone.load_state_dict(torch.load(tmp_path / "whole.pt"))
        _assert_equal(alone.state_dict(), expected, "one process")


def _assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{where}: {name}: {text}")


def test_a_whole_state_dict_of_an_old_format_loads_on_a_rank_of_one_stage() -> None:
    state = {name: value + 1 for name, value in seeded().state_dict().items()}
    for name in list(state):
        if name.endswith("num_batches_tracked"):
            del state[name]  # as before BatchNorm counted; it adds the entry itself
    with fake_mesh(pipe=2) as mesh:
        model = distribute(Normed(), mesh, stages=["blocks.1"], example_inputs=(rows_of(0),))
        model.load_state_dict(state)
        assert set(model.state_dict()) == {name for name in seeded().state_dict() if not name.startswith("blocks.1")}
        assert torch.equal(model.state_dict()["blocks.0.1.running_var"], torch.full((6,), 2.0))


class Counting(nn.Module):
    """Counts its calls in the first stage; the second one reads the count, directly or as a value made of it."""

    def __init__(self, reads_directly: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reads_directly = reads_directly
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.count.add_(1)
        scale = self.count * 2
        x = self.second(x + 1)
        return (x * (self.count if self.reads_directly else scale)).mean()


def test_a_stage_that_reads_what_another_one_changes_is_an_error() -> None:
    with fake_mesh(pipe=2) as mesh:
        with pytest.raises(SharedBufferError, match=r"'count' is changed by stage 0 and used by stage 1"):
            distribute(Counting(True), mesh, stages=["second"], example_inputs=(torch.zeros(2, 4),))
        distribute(Counting(False), mesh, stages=["second"], example_inputs=(torch.zeros(2, 4),))
