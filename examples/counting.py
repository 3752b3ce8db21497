"""What the examples of other libraries' loops learn: rows that count by random strides."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

ROWS, LENGTH, VOCABULARY = 48, 16, 96


def make_rows(seed: int) -> TensorDataset:
    """Rows of numbers: each number, and the one that follows it."""
    starts, strides = torch.randint(VOCABULARY, (2, ROWS, 1), generator=torch.Generator().manual_seed(seed))
    numbers = (starts + strides * torch.arange(LENGTH + 1)) % VOCABULARY
    return TensorDataset(numbers[:, :-1], numbers[:, 1:])
