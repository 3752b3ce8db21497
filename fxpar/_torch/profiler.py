"""The private PyTorch names behind its profilers."""

import torch


def is_profiling() -> bool:
    """Whether `torch.profiler`, or `emit_nvtx` of torch.autograd.profiler, takes notes of what this thread does."""
    return torch._C._autograd._profiler_enabled()
