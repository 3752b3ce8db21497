"""Let bags of equal lengths be sums of embeddings: those shard, and treat every sample by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpar.ir.node_meta import known_value


def write_out_bags(module: fx.GraphModule) -> None:
    """Replace calls of `embedding_bag` with a row of indices for each bag, in `module`, a graph from Dynamo.

    Before: `embedding_bag(ids, weight, None, ..., mode="mean")` with `ids` of shape (batch, length)
    After:  `_bags_of_rows(ids, weight, None, ..., mode="mean")`, which is `embedding(ids, weight).mean(1)`
    """
    for node in module.graph.find_nodes(op="call_function", target=functional.embedding_bag):
        ids = known_value(node.all_input_nodes[0])
        assert isinstance(ids, Tensor), f"{node} reads ids"
        if ids.dim() == 2 and not _has_own_gradient(*node.args, **node.kwargs):
            node.target = _bags_of_rows


def _has_own_gradient(
    ids: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether a call changes its weights, or its gradients are other than those of embeddings."""
    return max_norm is not None or scale_grad_by_freq


def _bags_of_rows(
    ids: Tensor,
    weight: Tensor,
    offsets: None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """As `torch.nn.functional.embedding_bag` of ids of shape (bags, length); a bag of padding alone is zero."""
    rows = functional.embedding(ids, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.amax(1) if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)
    counts = (ids != padding_idx % len(weight)).unsqueeze(-1)
    if mode == "max":
        largest = torch.where(counts, rows, -torch.inf).amax(1)
        return torch.where(counts.any(1), largest, 0.0)
    total = torch.where(counts, rows, 0.0).sum(1)
    return total if mode == "sum" else total / counts.sum(1).clamp(min=1)
