"""Fused kernels fill the multiprocessors that are not reserved."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fxpar.lowering.triton.plan import Fused
from fxpar.lowering.triton.tiling import Tiling


@pytest.fixture
def no_carveout() -> Iterator[None]:
    yield
    torch._C._set_sm_carveout_experimental(None)


def test_programs_leave_the_multiprocessors_that_pytorch_reserves(
    monkeypatch: pytest.MonkeyPatch, no_carveout: None
) -> None:
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    how = Fused(Tiling(64, 64, 64, warps=4, stages=4, programs=2))
    assert how.programs(torch.device("cuda", 0)) == 264
    torch._C._set_sm_carveout_experimental(8)
    assert how.programs(torch.device("cuda", 0)) == 248
    torch._C._set_sm_carveout_experimental(200)
    assert how.programs(torch.device("cuda", 0)) == 2
