"""`torch.autograd.detect_anomaly` asks each gradient for NaNs by an op that DTensor does not have in torch 2.13."""

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding


@functools.cache
def detect_anomalies_in_dtensors() -> None:
    """Let DTensor compute the op: on whole values, which is slow, as all is in that mode."""

    def whole(value: Any) -> Any:
        return [([Replicate()], [Replicate()])]

    register_sharding(torch.ops.aten._is_any_true.default)(whole)
