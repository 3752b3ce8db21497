"""Let bags of equal lengths be sums of embeddings: those shard, and treat every sample by itself."""

from __future__ import annotations

import inspect

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
        given = _SIGNATURE.bind(*node.args, **node.kwargs).arguments
        # The former changes the weights, the latter lets gradients be other than those of embeddings.
        is_plain = given.get("max_norm") is None and not given.get("scale_grad_by_freq")
        ids = known_value(given["input"])
        assert isinstance(ids, Tensor), f"{node} reads ids"
        if is_plain and ids.dim() == 2:
            node.target = _bags_of_rows


_SIGNATURE = inspect.signature(functional.embedding_bag)


def _bags_of_rows(
    input: Tensor,
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
    rows = functional.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.amax(1) if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)
    counts = (input != padding_idx % len(weight)).unsqueeze(-1)
    if mode == "max":
        largest = torch.where(counts, rows, -torch.inf).amax(1)
        return torch.where(counts.any(1), largest, 0.0)
    total = torch.where(counts, rows, 0.0).sum(1)
    return total if mode == "sum" else total / counts.sum(1).clamp(min=1)
