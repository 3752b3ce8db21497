"""Models of published sizes on the meta device, and small ones of any number of layers and kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from fxpar.bench.models import example

Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]

LLAMA_405B, GPT_80B, SMALL = "llama-405b", "gpt-80b", "small"


def scale_model(name: str, layers: int, kinds: int, batch: int) -> tuple[nn.Module, Inputs]:
    """The model `name` with so many layers, and the arguments of its forward for a batch of `batch` sequences.

    Args:
        kinds: how many kinds of layers, which differ in the width of their MLPs; only "small" may have several.
    """
    with torch.device("meta"):
        if name == LLAMA_405B:
            return _llama(layers, batch)
        if name == GPT_80B:
            return _gpt(layers, 1, batch, hidden=12288, heads=96, context=2048, vocabulary=51200)
        return _gpt(layers, kinds, batch, hidden=1024, heads=16, context=1024, vocabulary=32768)


def _llama(layers: int, batch: int) -> tuple[nn.Module, Inputs]:
    """Llama 3 405B, in the sizes of Table 3 of Dubey et al., "The Llama 3 Herd of Models"."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    ids = torch.zeros(batch, 8192, dtype=torch.int64)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def _gpt(
    layers: int, kinds: int, batch: int, *, hidden: int, heads: int, context: int, vocabulary: int
) -> tuple[nn.Module, Inputs]:
    """The example's GPT; of "gpt-80b", the sizes are those of Singh et al., section 6."""
    gpt = example("gpt")
    model = gpt.GPT(gpt.Config(vocabulary, context, layers, heads, hidden))
    for place, block in enumerate(model.blocks if kinds > 1 else ()):
        width = 4 * hidden + 256 * (place * kinds // layers)
        block.mlp.fc, block.mlp.out = nn.Linear(hidden, width), nn.Linear(width, hidden)
    tokens = torch.zeros(batch, context, dtype=torch.int64)
    return model, (tokens, tokens)
