"""Let the gradients of embeddings be dense: shards are parts of dense tensors, and those are what is reduced."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional

_POSITION_OF_SPARSE = {functional.embedding: 6, functional.embedding_bag: 7, torch.embedding: 4, torch.embedding_bag: 5}


def make_gradients_dense(module: fx.GraphModule) -> None:
    """Let every embedding in `module`, a graph from Dynamo, have a dense gradient, whatever its module was told.

    Before: `embedding(tokens, weight, ..., sparse=True)`
    After:  `embedding(tokens, weight, ..., sparse=False)`
    """
    for function, position in _POSITION_OF_SPARSE.items():
        for node in (node for node in module.graph.nodes if node.target is function):
            if len(node.args) > position:
                node.update_arg(position, False)
            elif "sparse" in node.kwargs:
                node.update_kwarg("sparse", False)
