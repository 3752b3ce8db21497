"""What PyTorch's compiler reads besides its arguments: process-wide settings that users change."""

from __future__ import annotations

import torch


def ambient_state() -> str:
    """The settings on which a trace, or its kernels, may depend, as text."""
    sdp = torch.backends.cuda
    found = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "attention": (sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()),
        "autocast": [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ],
    }
    return str(found)
