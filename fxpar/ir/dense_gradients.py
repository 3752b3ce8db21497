"""Let the gradients of embeddings be dense: shards are parts of dense tensors, and those are what is reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_POSITION_OF_SPARSE: Mapping[Any, int] = {
    functional.embedding: 6,
    functional.embedding_bag: 7,
    torch.embedding: 4,
    torch.embedding_bag: 5,
}


def make_gradients_dense(module: fx.GraphModule) -> None:
    """Let every embedding in `module`, a graph from Dynamo, have a dense gradient, whatever its module was told.

    Before: `embedding(tokens, weight, ..., sparse=True)`
    After:  `embedding(tokens, weight, ..., sparse=False)`
    """
    for node in module.graph.nodes:
        position = _POSITION_OF_SPARSE.get(node.target)
        if position is not None and len(node.args) > position:
            node.update_arg(position, False)
        elif position is not None and "sparse" in node.kwargs:
            node.update_kwarg("sparse", False)
