"""Lowerings: each turns a rank's local ATen graph into a callable.

The symlink fxpar/lowering makes this folder the package fxpar.lowering, its only name in imports.
"""

from torch import fx

import fxpar.lowering.cpu  # noqa: F401  what fused ops run on CPUs
from fxpar.config import ATEN, INDUCTOR, SLEEP, TENSORRT
from fxpar.dump import Dump
from fxpar.lowering.aten import lower_to_aten
from fxpar.lowering.inductor import lower_to_inductor
from fxpar.lowering.lowering import Lowering
from fxpar.lowering.sleep import ComputeTime, SleepingLowering
from fxpar.lowering.triton import register_on_gpus

__all__ = ["Lowering", "lower"]

register_on_gpus()


def _at_once(node: fx.Node) -> float:
    return 0.0


def lower(name: str, compute_us: ComputeTime = _at_once, dump: Dump | None = None) -> Lowering:
    """The lowering called `name`, one of `fxpar.config.LOWERINGS`.

    Args:
        compute_us: how long `SLEEP` sleeps in place of each op.
        dump: where `TENSORRT` writes which ops are in engines, and why others are not; by default nowhere.
    """
    if name == TENSORRT:
        from fxpar.lowering.tensorrt.lower import TensorRTLowering  # few steps need what it imports

        return TensorRTLowering(dump or Dump(None, 0))
    lowerings: dict[str, Lowering] = {
        INDUCTOR: lower_to_inductor,
        ATEN: lower_to_aten,
        SLEEP: SleepingLowering(compute_us),
    }
    return lowerings[name]
