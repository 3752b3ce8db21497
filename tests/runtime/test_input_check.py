"""In which steps inputs are compared, and which ranks must have the same."""

from __future__ import annotations

from fxpar.runtime.input_check import differences, is_checked
from fxpar.world.mesh import Mesh


def test_the_first_steps_are_checked_and_then_every_1024th() -> None:
    checked = [step for step in range(1, 5000) if is_checked(step)]
    assert checked == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


def test_only_ranks_of_one_batch_shard_must_agree() -> None:
    mesh = Mesh(pipe=2, data=2, x=2)
    shards = [mesh.batch_shard(mesh.coordinate_of(rank)) for rank in range(8)]
    assert differences([{"tokens": shard, "mask": 7} for shard in shards], mesh) == []
    by_rank = [{"tokens": rank, "mask": 7} for rank in range(8)]
    assert differences(by_rank, mesh) == [
        "'tokens' of ranks 1, 4, 5 is not that of rank 0 (batch shard 0)",
        "'tokens' of ranks 3, 6, 7 is not that of rank 2 (batch shard 1)",
    ]
