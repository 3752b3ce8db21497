"""Assignments to `DTensor.data`, which PyTorch accepts and forgets; seen in torch 2.13."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def let_data_be_assigned(piece_of: Callable[[DTensor, Tensor], Tensor | None]) -> None:
    """From now on, `tensor.data = value` lets a DTensor have the local tensor `piece_of(tensor, value)`.

    Where that is None, PyTorch's own assignment is made.
    """
    plain: Any = torch.Tensor.data

    def assign(self: DTensor, value: Tensor) -> None:
        piece = piece_of(self, value)
        if piece is None:
            plain.__set__(self, value)
        else:
            self._local_tensor = piece

    DTensor.data = property(plain.__get__, assign)  # type: ignore[assignment]
