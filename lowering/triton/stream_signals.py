"""Signals that a CUDA stream sets and awaits between its copies, without a kernel.

A kernel would need a multiprocessor, and none is free while a grid that fills them all waits for the signal.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: that (int32)(found - value) >= 0


def set_signal(signal: Tensor, value: int) -> None:
    """Let the current stream write `value`, modulo 2^32, after all earlier work is done and visible to all devices.

    signal: one int32, on this device or on one that it can write to.
    """
    _check("cuStreamWriteValue32_v2", *_operands(signal, value), ctypes.c_uint(0))


def await_signal(signal: Tensor, value: int) -> None:
    """Let the current stream wait until `signal`, one int32 on this device, is `value` or later, modulo 2^32."""
    _check("cuStreamWaitValue32_v2", *_operands(signal, value), ctypes.c_uint(_AT_LEAST))


def _operands(signal: Tensor, value: int) -> tuple[ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]:
    assert signal.dtype == torch.int32 and signal.numel() == 1, "a signal is one int32"
    stream = torch.cuda.current_stream(signal.device)
    return ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(signal.data_ptr()), ctypes.c_uint32(value % (1 << 32))


def _check(function: str, *arguments: ctypes._SimpleCData[int] | ctypes.c_void_p) -> None:
    status = getattr(_driver(), function)(*arguments)
    assert status == 0, f"{function} failed with CUresult {status}"


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
