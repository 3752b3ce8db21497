"""In which dtypes a step computes, communicates and reduces, beside the dtype in which parameters are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpar.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class Precision:
    """Mixed precision: a step computes with copies of the parameters, which stay as they are for the optimizer.

    Floating-point parameters are copied once per step, on each rank its shard; weights are gathered, and activations
    and their gradients cross between stages, in `compute`. Every module with parameters of its own converts the
    floating-point tensors among its arguments to the dtype of these.

    Args:
        compute: the dtype of the copies, such as `torch.bfloat16`.
        reduce: the dtype in which gradients of parameters are summed, over microbatches and over ranks. Optimizers get
            them in the dtype of the parameters.
        keep: patterns of the names of parameters that are used as they are stored; `*` matches any text, dots included.
            Parameters of modules that have floating-point buffers too, such as the running mean of a batch norm, are
            used as they are stored in any case.

    Raises:
        InvalidOptionError: `compute` or `reduce` is no floating-point dtype, or `keep` is a single string.
    """

    compute: torch.dtype
    reduce: torch.dtype = torch.float32
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in ("compute", "reduce"):
            given = getattr(self, option)
            if not (isinstance(given, torch.dtype) and given.is_floating_point):
                raise InvalidOptionError(f"precision.{option}", given, "a floating-point dtype, as torch.bfloat16")
        if isinstance(self.keep, str):
            raise InvalidOptionError("precision.keep", self.keep, "a sequence of patterns, not one string")
        object.__setattr__(self, "keep", tuple(self.keep))
