"""fxpar needs no Triton; where there is one, the fused ops run on CUDA devices by kernels of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fxpar.ir import fused_ops, random
from fxpar.lowering.triton import register_on_gpus


def test_fxpar_does_not_import_triton_before_it_is_wanted() -> None:
    script = "import sys; sys.modules['triton'] = None; import fxpar, fxpar.ir.fused_ops; print('imported')"
    assert subprocess.check_output([sys.executable, "-c", script], text=True, timeout=120).strip() == "imported"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is built for CUDA")
def test_without_cuda_the_ops_are_left_as_they_are() -> None:
    assert not register_on_gpus()


def test_kernels_for_cuda_are_registered_for_every_op() -> None:
    pytest.importorskip("triton")
    import fxpar.lowering.triton.register  # noqa: F401  registers them

    for op in (
        fused_ops.all_gather_matmul,
        fused_ops.matmul_reduce_scatter,
        fused_ops.matmul_all_reduce,
        random.uniform,
    ):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op._qualname, "CUDA")
