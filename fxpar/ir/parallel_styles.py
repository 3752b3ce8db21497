"""Parallel styles, by which models' authors and PyTorch say how a module is tensor-parallel, as hints for parameters.

A style is a name, as in the `tp_plan` of a transformers model, or an object, such as torch's `ColwiseParallel()` or one
of diffusers'. Most of what a style says follows from where its weight is sharded: the layouts of activations, and where
gradients are reduced, are derived by the rules, so that only the hints of parameters are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from fxpar.errors import UnknownStyleError
from fxpar.ir.hints import Entry, Grouped, Spec
from fxpar.ir.layout import AXES

AXIS = "x"
"""The axis that styles shard over."""

Style: TypeAlias = str | object


@dataclass(frozen=True, slots=True)
class StyledParameter:
    """A parameter that a style is asked about: the module that holds it, and its shape."""

    module: nn.Module
    shape: tuple[int, ...]


def hint_of_style(style: Style, of: StyledParameter, where: str) -> Spec | None:
    """The hint for a parameter; None if the style says nothing about it.

    Raises:
        UnknownStyleError: nothing here knows the style of `where`.
    """
    if isinstance(style, str):
        if style not in _BY_NAME:
            raise UnknownStyleError(where, style, sorted(_BY_NAME))
        return _BY_NAME[style](of)
    for known in type(style).__mro__:
        if known.__name__ in _BY_CLASS:
            return _BY_CLASS[known.__name__](style, of)
    raise UnknownStyleError(where, type(style).__name__, sorted(_BY_CLASS))


def is_style(hint: object) -> bool:
    """Whether `hint` is a style rather than a sequence with an entry per dim; an axis alone is the latter."""
    return hint not in AXES if isinstance(hint, str) else not isinstance(hint, Sequence)


def _sharded(of: StyledParameter, dim: int, groups: int = 1) -> Spec:
    """Shard `dim`, each of its `groups` equal parts by itself."""
    spec: list[Entry] = [None] * len(of.shape)
    spec[dim] = AXIS if groups == 1 else Grouped(groups, AXIS)
    return tuple(spec)


def _replicated(of: StyledParameter) -> Spec:
    return (None,) * len(of.shape)


def _columns(of: StyledParameter, groups: int = 1) -> Spec:
    """The output features: the rows of a weight (out, in), also of a stack (experts, out, in), and a bias."""
    return _sharded(of, max(len(of.shape) - 2, 0), groups)


def _rows(of: StyledParameter, groups: int = 1) -> Spec:
    """The input features: the columns of a weight. A bias is added after the sum."""
    return _replicated(of) if len(of.shape) == 1 else _sharded(of, -1, groups)


def _nothing(of: StyledParameter) -> None:
    return None


_BY_NAME: Mapping[str, Callable[[StyledParameter], Spec | None]] = {
    "colwise": _columns,
    "colwise_rep": _columns,
    "colwise_gather_output": _columns,
    "rowwise": _rows,
    "rowwise_rep": _rows,
    "rowwise_split_input": _rows,
    "packed_colwise": partial(_columns, groups=2),
    "packed_rowwise": partial(_rows, groups=2),
    "embedding_rowwise": partial(_sharded, dim=0),
    "embedding_colwise": partial(_sharded, dim=1),
    "replicate": _replicated,
    # Of these, transformers must be told that gradients are partial, and where; rules find that.
    "replicated_with_grad_allreduce": _replicated,
    "mla_kv_a_proj": _replicated,
    "sequence_parallel": _replicated,
    # Of these, the parameters have styles of their own, or none: experts that are whole on their ranks need an axis of
    # their own, since the layouts over x cannot say which rows a rank computes.
    "grouped_gemm": _nothing,
    "all_reduce": _nothing,
    "local_params": _nothing,
    "moe_tp_experts": _nothing,
    "moe_identity_expert": _nothing,
    "ep_dispatch_experts": _nothing,
}
"""The styles of transformers' plans."""


def _columns_of_module(style: Any, of: StyledParameter) -> Spec:
    return _sharded(of, 1) if isinstance(of.module, nn.Embedding) else _columns(of)


def _rows_of_module(style: Any, of: StyledParameter) -> Spec:
    return _sharded(of, 0) if isinstance(of.module, nn.Embedding) else _rows(of)


def _packed_columns(style: Any, of: StyledParameter) -> Spec:
    return _columns(of, _equal_groups(style, of, "_tp_packed_col_blocks"))


def _packed_rows(style: Any, of: StyledParameter) -> Spec:
    return _rows(of, _equal_groups(style, of, "_tp_packed_row_blocks"))


def _equal_groups(style: Any, of: StyledParameter, attribute: str) -> int:
    """Into how many equal groups a dim is cut so that each of its blocks, of different sizes, is some of them."""
    blocks: Sequence[int] = style.blocks or getattr(of.module, attribute, None) or (1,)
    return sum(blocks) // math.gcd(*blocks)


_BY_CLASS: Mapping[str, Callable[[Any, StyledParameter], Spec | None]] = {
    "ColwiseParallel": _columns_of_module,
    "RowwiseParallel": _rows_of_module,
    "SequenceParallel": lambda style, of: _replicated(of),
    "PackedColwiseParallel": _packed_columns,
    "PackedRowwiseParallel": _packed_rows,
    "PrepareModuleInput": lambda style, of: None,
    "PrepareModuleOutput": lambda style, of: None,
    "PrepareModuleInputOutput": lambda style, of: None,
}
"""The styles of `torch.distributed.tensor.parallel` and of diffusers, by the names of their classes or base classes."""
