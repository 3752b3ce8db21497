"""The private PyTorch names behind devices."""

import torch


def keep_device_busy(cycles: int) -> None:
    """Let the current stream of the current GPU do nothing for so many of its clock's cycles."""
    torch.cuda._sleep(cycles)
