"""The fused ops on CUDA devices: Triton kernels over symmetric memory, fed by the copy engine."""

from importlib.util import find_spec

import torch


def register_on_gpus() -> bool:
    """Let the fused ops run these kernels on CUDA devices; returns whether they do.

    They need a PyTorch that is built for CUDA, and Triton. Otherwise, and where GPUs cannot reach each other's memory,
    the ops remain what they are by definition: a collective and a matmul, one after the other.
    """
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    import fxpar.lowering.triton.register  # noqa: F401  registers them

    return True
