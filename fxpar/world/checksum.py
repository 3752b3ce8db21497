"""Numbers that tell whether ranks have the same tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_WORDS = 1 << 20  # bounds what a checksum takes in memory

_SAMPLED = 1 << 20
"""How many elements of a tensor a fingerprint weighs, at most: that takes 20 ms."""


def checksum(value: Tensor) -> int:
    """64 bits that depend on every byte of `value` and on its position, but not on strides.

    The sum, over all words, of a hash of the word times a hash of its position.
    """
    words = _words(value)
    parts = [_weighed(chunk) for chunk in words.split(_CHUNK_WORDS)]
    return int(_weighed(torch.stack(parts)).item())


def fingerprint(value: Tensor) -> tuple[int, int]:
    """128 bits that depend on every byte of `value`, at a sixteenth of the cost of a checksum if `value` is large.

    The sum of its words, and the checksum of elements at equal distances, by whose positions shuffled values differ.
    """
    flat = value.detach().reshape(-1)
    total = sum(int(_words(chunk).sum().item()) for chunk in flat.split(_CHUNK_WORDS))
    return total, checksum(flat[:: max(1, -(-flat.numel() // _SAMPLED))])


def _words(value: Tensor) -> Tensor:
    """The bytes of `value` in the order of its elements, as int64, padded with zeros."""
    flat = value.detach().reshape(-1).contiguous().view(torch.uint8)
    padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
    padded[: flat.numel()] = flat
    return padded.view(torch.int64)


def _weighed(words: Tensor) -> Tensor:
    weights = _mixed(torch.arange(1, words.numel() + 1, device=words.device)) | 1
    return _mixed(_folded(words) * weights).sum()


def _mixed(words: Tensor) -> Tensor:
    """A bijective hash: every bit of the result depends on many; constants of SplitMix64 (Steele et al., 2014)."""
    words = _folded(words) * -0x40A7B892E31B1A47
    return _folded(words) * -0x6B2FB644ECCEEE15


def _folded(words: Tensor) -> Tensor:
    """XOR the upper half of each word into the lower, which sums and products never do; a bijection."""
    return words ^ ((words >> 32) & 0xFFFFFFFF)
