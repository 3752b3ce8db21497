"""A small language model that attends within documents by flex attention, and the same by a whole mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

WINDOW, LONGEST, VOCABULARY = 5, 16, 97
HEAD = 16  # the least that Inductor's kernels for GPUs take


class FlexAttention(nn.Module):
    """Attention with learned biases by head and distance; grouped queries, if there are fewer heads of keys."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.out = nn.Linear(width, HEAD * heads), nn.Linear(HEAD * heads, width)
        self.k, self.v = nn.Linear(width, HEAD * kv_heads), nn.Linear(width, HEAD * kv_heads)
        self.bias = nn.Parameter(torch.randn(heads, LONGEST))

    def forward(self, x: Tensor, mask: Tensor | BlockMask) -> Tensor:
        q, k, v = (self._heads(p(x)) for p in (self.q, self.k, self.v))
        if isinstance(mask, Tensor):
            y = self._whole(q, k, v, mask)
        else:
            bias = self.bias

            def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                return score + bias[h, (q_idx - kv_idx).abs()]

            y = flex_attention(q, k, v, score_mod=biased, block_mask=mask, enable_gqa=self.heads != self.kv_heads)
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        scores = q @ k.mT / math.sqrt(HEAD) + self.bias[:, distances(q.shape[2]).abs()]
        return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


class FlexModel(nn.Module):
    """Takes documents by their numbers, and perhaps a block mask of these; `dense` attends by a whole mask."""

    def __init__(self, width: int = 24, heads: int = 4, kv_heads: int = 2, dense: bool = False) -> None:
        super().__init__()
        self.dense = dense
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(FlexAttention(width, heads, kv_heads) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor, block_mask: BlockMask | None = None
    ) -> Tensor:
        mask: Tensor | BlockMask | None = block_mask
        if mask is None:
            mask = whole_mask(documents) if self.dense else document_mask(documents)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def document_mask(documents: Tensor) -> BlockMask:
    """Each token attends to the last ones of its document, itself included."""

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (documents[b, q_idx] == documents[b, kv_idx]) & within_window(b, h, q_idx, kv_idx)

    rows, length = documents.shape
    device = documents.device
    size = 4 if device.type == "cpu" else 128  # so small that there are several, where Inductor's kernels take it
    return create_block_mask(within, rows, None, length, length, device=device, BLOCK_SIZE=size)


def within_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def whole_mask(documents: Tensor) -> Tensor:
    """The same as a tensor: rows, one head, queries, keys."""
    distance = distances(documents.shape[1]).to(documents.device)
    same = documents[:, :, None] == documents[:, None]
    return (same & (distance >= 0) & (distance < WINDOW))[:, None]


def distances(length: int) -> Tensor:
    """From each key, in columns, to each query."""
    places = torch.arange(length)
    return places[:, None] - places
