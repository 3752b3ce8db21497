"""The fused ops on CUDA devices: Triton kernels over symmetric memory, and copies by the copy engine."""

from importlib.util import find_spec

import torch


def register_on_gpus() -> bool:
    """Register these kernels for the fused ops on CUDA devices; returns whether that was possible.

    They need a PyTorch that is built for CUDA, and Triton. Otherwise, and if GPUs cannot access each other's memory,
    the ops run their reference: a collective and a matmul, one after the other.
    """
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    import fxpar.lowering.triton.register  # noqa: F401  registers them

    return True
