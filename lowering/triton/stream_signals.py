"""Signals that a CUDA stream sets and awaits between its copies, without a kernel.

A kernel would need a multiprocessor, and none is free while a grid that fills them all waits for the signal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: that (int32)(found - value) >= 0


def set_signal(signal: Tensor, value: int) -> None:
    """Let the current stream write `value`, modulo 2^32, after all earlier work is done and visible to all devices.

    signal: one int32, on this device or on one that it can write to.
    """
    _check("cuStreamWriteValue32_v2", _writer(), signal, value, 0)


def await_signal(signal: Tensor, value: int) -> None:
    """Let the current stream wait until `signal`, one int32 on this device, is `value` or later, modulo 2^32."""
    _check("cuStreamWaitValue32_v2", _waiter(), signal, value, _AT_LEAST)


def _check(name: str, function: Callable[..., int], signal: Tensor, value: int, flags: int) -> None:
    assert signal.dtype == torch.int32 and signal.numel() == 1, "a signal is one int32"
    stream: int = torch.cuda.current_stream().cuda_stream
    status = function(stream, signal.data_ptr(), value % (1 << 32), flags)
    assert status == 0, f"{name} failed with CUresult {status}"


@cache
def _writer() -> Callable[..., int]:
    return _with_types(_driver().cuStreamWriteValue32_v2)


@cache
def _waiter() -> Callable[..., int]:
    return _with_types(_driver().cuStreamWaitValue32_v2)


def _with_types(function: Any) -> Callable[..., int]:
    function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    typed: Callable[..., int] = function
    return typed


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
