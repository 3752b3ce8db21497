"""What the lowering "tensorrt" needs, checked before the passes run."""

from __future__ import annotations

from importlib.util import find_spec

from fxpar.config import TENSORRT
from fxpar.errors import ForwardOnlyLoweringError, LoweringDeviceError, MissingPackageError


def check_tensorrt(device_type: str, *, with_backward: bool) -> None:
    """Check that a step on such devices can run by TensorRT.

    Raises:
        ForwardOnlyLoweringError: it has a backward.
        LoweringDeviceError: the devices are no CUDA devices.
        MissingPackageError: torch-tensorrt is not installed.
    """
    if with_backward:
        raise ForwardOnlyLoweringError(TENSORRT)
    check_cuda(device_type)
    if find_spec("torch_tensorrt") is None:
        raise MissingPackageError("torch-tensorrt", f'builds the engines of the lowering "{TENSORRT}"')


def check_cuda(device_type: str) -> None:
    """Check that TensorRT runs on such devices.

    Raises:
        LoweringDeviceError: it does not.
    """
    if device_type != "cuda":
        raise LoweringDeviceError(TENSORRT, "cuda", device_type)
