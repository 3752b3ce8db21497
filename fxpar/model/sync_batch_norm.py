"""`torch.nn.SyncBatchNorm` in a distributed model: statistics of each microbatch over all batch shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import UnsupportedGraphError


def synchronized_forward(module: nn.SyncBatchNorm, path: str, num_shards: int) -> Callable[..., Any]:
    """A forward for the class of `module` that traces to means over batch shards rather than to collectives.

    torch's forward gathers over a process group that is independent of the mesh, and refuses CPUs. In training, mean
    and variance are those of one microbatch on all `num_shards` batch shards, which have equally many rows. In
    evaluation, this calls the class's own forward.

    Raises:
        UnsupportedGraphError: the module has a process group of its own.
    """
    if module.process_group is not None:
        raise UnsupportedGraphError(
            f"SyncBatchNorm {path!r} has a process group of its own: expected none, since its statistics are those of "
            "all batch shards of the mesh; leave out process_group="
        )
    own_forward = type(module).forward

    def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        if not self.training:
            return own_forward(self, input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(x.dim()) if dim != 1]
        per_channel = [1, -1] + [1] * (x.dim() - 2)
        mean: Tensor = torch.ops.fxpar.batch_mean(x.mean(dims))
        centered = x - mean.view(per_channel)
        # Computed from centered values: E[x^2] - E[x]^2 would lose precision in channels with a large mean.
        variance: Tensor = torch.ops.fxpar.batch_mean(centered.square().mean(dims))
        if self.track_running_stats:
            _track(self, mean.detach(), variance.detach(), num_shards * (x.numel() // x.shape[1]))
        result = centered * torch.rsqrt(variance + self.eps).view(per_channel)
        if self.affine:
            result = result * self.weight.view(per_channel) + self.bias.view(per_channel)
        return result.to(input.dtype)

    return forward


def _track(module: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update the running statistics with those of `count` values per channel; the running variance is unbiased."""
    assert module.num_batches_tracked is not None and module.running_mean is not None
    assert module.running_var is not None
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        # Without a momentum, the running statistics are averages over all batches so far.
        factor = 1.0 / module.num_batches_tracked if module.momentum is None else module.momentum
        module.running_mean.copy_(module.running_mean * (1 - factor) + mean * factor)
        unbiased = variance * (count / max(count - 1, 1))
        module.running_var.copy_(module.running_var * (1 - factor) + unbiased * factor)
