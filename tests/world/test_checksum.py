"""Checksums and fingerprints tell values apart, whatever their strides."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.world import checksum as checksums
from fxpar.world.checksum import checksum, fingerprint

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
    monkeypatch.setattr(checksums, "_CHUNK_WORDS", 4)
    value = torch.arange(64)
    assert checksum(value) == checksum(value.clone())
    assert checksum(value) != checksum(value.view(16, 4).flip(0).reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_fingerprint_depends_on_every_element_and_on_the_order_of_those_it_weighs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(checksums, "_SAMPLED", 16)
    value = torch.randint(2, (9, 11), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert fingerprint(value) == fingerprint(value.t().contiguous().t())
    for index in range(value.numel()):
        changed = value.clone()
        changed.view(-1)[index] = 1 - changed.view(-1)[index].int()
        assert fingerprint(changed) != fingerprint(value)
    assert fingerprint(value.flip(0)) != fingerprint(value)
