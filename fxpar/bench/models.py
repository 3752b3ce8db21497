"""The models that benchmarks run, with hints that shard their matrices over x."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import fxpar
from fxpar.ir.hints import Spec


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on the meta device, the keyword arguments of its forward, and hints."""

    model: nn.Module
    inputs: Mapping[str, Any]
    hints: Mapping[str, Spec]


def example(name: str) -> ModuleType:
    """The module examples/NAME.py, which is packaged with fxpar."""
    folder = (Path(fxpar.__file__).parent / "examples").resolve()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return import_module(name)


def hugging_face_model(name: str, layers: int, batch: int, length: int) -> Subject:
    """GPT-2 ("gpt2") or Llama ("llama") of transformers, hidden size 768 with 12 heads, with random weights."""
    import transformers

    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    with torch.device("meta"):
        if name == "gpt2":
            small = transformers.GPT2Config(n_layer=layers, n_embd=768, n_head=12, n_positions=length)
            return Subject(transformers.GPT2LMHeadModel(small), inputs, GPT2_HINTS)
        tiny = transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=768,
            intermediate_size=2048,
            num_attention_heads=12,
            max_position_embeddings=length,
        )
        return Subject(transformers.LlamaForCausalLM(tiny), inputs, LLAMA_HINTS)


GPT_HINTS: Mapping[str, Spec] = {  # of the example's GPT
    "blocks.*.attention.qkv.weight": ("x", None),
    "blocks.*.attention.out.weight": (None, "x"),
    "blocks.*.mlp.fc.weight": ("x", None),
    "blocks.*.mlp.out.weight": (None, "x"),
}
GPT2_HINTS: Mapping[str, Spec] = {  # its Conv1D weights are (input, output)
    "transformer.h.*.attn.c_attn.weight": (None, "x"),
    "transformer.h.*.attn.c_proj.weight": ("x", None),
    "transformer.h.*.mlp.c_fc.weight": (None, "x"),
    "transformer.h.*.mlp.c_proj.weight": ("x", None),
}
LLAMA_HINTS: Mapping[str, Spec] = {
    "model.layers.*.self_attn.[qkv]_proj.weight": ("x", None),
    "model.layers.*.self_attn.o_proj.weight": (None, "x"),
    "model.layers.*.mlp.gate_proj.weight": ("x", None),
    "model.layers.*.mlp.up_proj.weight": ("x", None),
    "model.layers.*.mlp.down_proj.weight": (None, "x"),
}

_SEQUENCE: Spec = (None, "x", None)
"""The hint for activations (batch, sequence, hidden)."""

GPT_SEQUENCE_HINTS: Mapping[str, Spec] = {
    **GPT_HINTS,
    "tokens.weight": ("x", None),
    "positions.weight": ("x", None),
    "*norm:out": _SEQUENCE,
    "blocks.*.attention.out:out": _SEQUENCE,
    "blocks.*.mlp.out:out": _SEQUENCE,
}
"""Sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 4.2.2):
outside of the split matrices, norms and residuals have a part of the sequence on each rank."""

LLAMA_SEQUENCE_HINTS: Mapping[str, Spec] = {
    **LLAMA_HINTS,
    "model.embed_tokens.weight": ("x", None),
    "model.embed_tokens:out": _SEQUENCE,
    "model.*norm:out": _SEQUENCE,
    "model.layers.*.self_attn.o_proj:out": _SEQUENCE,
    "model.layers.*.mlp.down_proj:out": _SEQUENCE,
}
"""The same for Llama."""
