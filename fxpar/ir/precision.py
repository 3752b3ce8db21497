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
        loss_scale: for `compute=torch.float16`, the factor on the loss at first, such as 2.0**16, so that gradients do
            not underflow; it adapts as that of `torch.amp.GradScaler`. Gradients are returned without it. Where one
            overflowed, those of all ranks are infinite or NaN: the step must be skipped, as `GradScaler.step` does.

    Raises:
        InvalidOptionError: `compute` or `reduce` is no floating-point dtype, `keep` is a single string, or `loss_scale`
            is not positive.
    """

    compute: torch.dtype
    reduce: torch.dtype = torch.float32
    keep: tuple[str, ...] = ()
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        for option in ("compute", "reduce"):
            given = getattr(self, option)
            if not (isinstance(given, torch.dtype) and given.is_floating_point):
                raise InvalidOptionError(f"precision.{option}", given, "a floating-point dtype, as torch.bfloat16")
        if isinstance(self.keep, str):
            raise InvalidOptionError("precision.keep", self.keep, "a sequence of patterns, not one string")
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.loss_scale is not None and not self.loss_scale > 0:
            raise InvalidOptionError("precision.loss_scale", self.loss_scale, "a positive number, as 2.0**16")
