"""Checksums of inputs, and which ranks must have the same."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.runtime import input_check
from fxpar.runtime.input_check import checksum, differences, is_checked
from fxpar.world.mesh import Mesh

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@given(st.lists(st.integers(0, 1), min_size=2, max_size=40), st.randoms(), st.sampled_from(DTYPES))
def test_another_order_has_another_checksum(values: list[int], random: Random, dtype: torch.dtype) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    one, other = torch.tensor(values).to(dtype), torch.tensor(shuffled).to(dtype)
    assert (checksum(one) == checksum(other)) == (values == shuffled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter_and_a_single_bit_does(dtype: torch.dtype) -> None:
    value = torch.arange(2 * 3 * 5).view(2, 3, 5).remainder(2).to(dtype)
    assert checksum(value) == checksum(value.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert checksum(value) == checksum(torch.cat([value, value])[2:])
    seen = {checksum(value)}
    for index in range(value.numel()):
        changed = value.clone()
        changed.view(-1)[index] = 1 - changed.view(-1)[index].int()
        seen.add(checksum(changed))
    assert len(seen) == 1 + value.numel()


def test_scalars_empty_tensors_and_those_that_require_grad_have_checksums() -> None:
    assert checksum(torch.tensor(1.5)) == checksum(torch.tensor(1.5, requires_grad=True)) != checksum(torch.tensor(2.5))
    assert checksum(torch.empty(0, 4)) == checksum(torch.empty(0, 4))


def test_large_tensors_are_summed_up_in_parts_whose_order_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_check, "_CHUNK_WORDS", 4)
    value = torch.arange(64)
    assert checksum(value) == checksum(value.clone())
    assert checksum(value) != checksum(value.view(16, 4).flip(0).reshape(-1))


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
