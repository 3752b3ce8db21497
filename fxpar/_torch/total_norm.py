"""The norm by which `torch.nn.utils.clip_grad_norm_` clips, seen in torch 2.11 to 2.13."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad


def replace_total_norm(replacement: Callable[[Sequence[Tensor], float], Tensor | None]) -> None:
    """Let `clip_grad_norm_` ask `replacement` for the norm of gradients first; PyTorch's own follows where it is None.

    Its callers may have imported it already, but it looks up this part of itself by name. `get_total_norm` stays as it
    is: those who call it know which gradients they have.
    """
    own = clip_grad._get_total_norm

    def _get_total_norm(
        tensors: Sequence[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        with torch.no_grad():
            found = replacement(tensors, float(norm_type))
        if found is None:
            return own(tensors, norm_type, error_if_nonfinite, foreach)
        return own([found], norm_type, error_if_nonfinite)  # the norm of a norm is itself

    vars(clip_grad)["_get_total_norm"] = _get_total_norm
