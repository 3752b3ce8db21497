"""Pad sequences to the longest of all batch shards: shapes must be equal, but a collator knows those of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

_IGNORED_LABEL = -100
_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""What says of tokens which of them count: those without a mask are not padded."""


def pad_to_common_lengths(inputs: Mapping[str, Any], pad_token: int) -> dict[str, Any]:
    """The inputs of a model of transformers, of which sequences are as long on all ranks; a collective of all ranks.

    Tokens that have a mask are padded on the right, as are the mask, positions, types and labels of tokens. All else is
    as it was, and so are tensors that are as long already.
    """
    fillers = _fillers(inputs, pad_token)
    if not fillers:
        return dict(inputs)
    lengths = [inputs[name].shape[1] for name in fillers]
    longest = torch.tensor(lengths, device=inputs[next(iter(fillers))].device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = {
        name: pad(inputs[name], (0, wanted - length), value=filler)
        for (name, filler), length, wanted in zip(fillers.items(), lengths, longest.tolist(), strict=True)
        if wanted > length
    }
    return {**inputs, **padded}


def _fillers(inputs: Mapping[str, Any], pad_token: int) -> dict[str, int]:
    """What each input of one entry for each token is padded with."""
    found: dict[str, int] = {}
    for tokens, mask in _MASKS.items():
        if _is_of_tokens(inputs.get(tokens)) and mask in inputs:
            found |= {tokens: pad_token, mask: 0}
    if "input_ids" in found:
        shape = inputs["input_ids"].shape
        same = ("token_type_ids", "position_ids")
        found |= {name: 0 for name in same if _is_of_tokens(inputs.get(name)) and inputs[name].shape == shape}
    if found and _is_of_tokens(inputs.get("labels")):
        found["labels"] = _IGNORED_LABEL
    return found


def _is_of_tokens(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2
