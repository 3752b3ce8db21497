"""Checks that a matrix could be factorised, which torch 2.13 orders among all ops with effects."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _get_effect, _register_effectful_op

from fxpar._torch.compiler import assert_async

_CHECK = torch.ops.aten._linalg_check_errors.default
_NAME = "aten::_linalg_check_errors"


def _assert_success(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    assert_async((info == 0).all(), f"{api_name}: a matrix is singular, or not what the operation needs")


AS_ASSERTIONS: Mapping[Any, Callable[..., Any]] = {_CHECK: _assert_success}
"""Decompositions of the checks into assertions, which need no order."""


@contextmanager
def linalg_checks_in_any_order() -> Iterator[None]:
    """Within, traces do not order the checks by effect tokens."""
    effect = _get_effect(_NAME)
    _register_effectful_op(_NAME, None)
    try:
        yield
    finally:
        _register_effectful_op(_NAME, effect)
