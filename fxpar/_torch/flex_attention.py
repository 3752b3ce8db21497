"""The private PyTorch names behind flex attention, and what keeps it from training on CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
    sdpa_dense,
    sdpa_dense_backward,
)
from torch.nn.attention import flex_attention as interface

__all__ = [
    "flex_attention",
    "flex_attention_backward",
    "sdpa_dense",
    "sdpa_dense_backward",
    "training_on_cpus",
]


def _accept_any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """In place of a check that refuses tensors on CPUs that require gradients: Inductor has no kernel for these."""


@contextmanager
def training_on_cpus() -> Iterator[None]:
    """Within, Dynamo traces flex attention on CPUs with gradients, too."""
    with patch.object(interface, "_validate_device", _accept_any_device):
        yield
