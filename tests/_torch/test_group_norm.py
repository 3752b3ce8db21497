"""Group norm on fake tensors has the strides of the kernel."""

from __future__ import annotations

import pytest
import torch

from fxpar._torch.compiler import FakeTensorMode
from fxpar._torch.group_norm import correct_strides_of_group_norm


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_fake_results_lie_in_memory_as_real_ones(
    dtype: torch.dtype, memory_format: torch.memory_format, has_weight: bool
) -> None:
    correct_strides_of_group_norm()
    given = torch.randn(2, 8, 4, 4, dtype=dtype).to(memory_format=memory_format)
    weight = torch.ones(8, dtype=dtype) if has_weight else None
    real = torch.ops.aten.native_group_norm(given, weight, weight, 2, 8, 16, 4, 1e-5)
    with FakeTensorMode() as mode:
        fake_weight = None if weight is None else mode.from_tensor(weight)
        fake = torch.ops.aten.native_group_norm(mode.from_tensor(given), fake_weight, fake_weight, 2, 8, 16, 4, 1e-5)
    assert real[0].is_contiguous(memory_format=memory_format)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
