"""Configurations of transformers' models that are as small as they can be: by the names of their fields alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

VOCABULARY, LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_SIZE = 96, 2, 4, 2, 8
HIDDEN = HEADS * HEAD_SIZE
IMAGE, PATCH, CHANNELS = 16, 4, 3

_SIZES: Mapping[str, int] = {
    r"vocab_size|.*_vocab_size|vocab_size_.*": VOCABULARY,
    r"hidden_size|d_model|n_embd|dim|hidden_dim|embed_dim|embedding_size|.*_hidden_size|word_embed_proj_dim": HIDDEN,
    r"(moe_|shared_)?(expert_)?intermediate_size(_mlp)?|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim": 2 * HIDDEN,
    r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(encoder|decoder)_layers": LAYERS,
    r"num_attention_heads|n_heads?|num_heads|.*_attention_heads": HEADS,
    r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num": KEY_VALUE_HEADS,
    r"head_dim|d_kv|.*_head_dim|attention_head_size": HEAD_SIZE,
    r"(n_)?mamba_(n_|num_)?heads": HEADS * 2,
    r"mamba_(d_head|headdim)": HEAD_SIZE,
    r"mamba_d_ssm": 2 * HIDDEN,
    r"rotary_dim": HEAD_SIZE // 2,
    r"n_positions|max_position_embeddings|max_.*positions|n_ctx|seq_length|max_seq_len": 64,
    r"num_experts|n_routed_experts|num_local_experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": 2,
    r"n_group|topk_group": 1,
    r"kv_lora_rank|q_lora_rank": 16,
    r"image_size": IMAGE,
    r"patch_size": PATCH,
    r"sliding_window|attention_window|local_attention.*|window_size": 8,
}
"""Patterns of names, and the number that a field of such a name gets if it is larger."""


def shrink(config: Any) -> None:
    """Make the sizes of a configuration, and of those in it, small, in place.

    Lists with an entry for each layer keep the first entries of each kind. Dropout is off, and there is no cache.
    """
    fields = dict(vars(config))
    depths = {value for name, value in fields.items() if _size_for(name) == LAYERS and _is_size(value)}
    for name, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value)
        elif _is_size(value) and (size := _size_for(name)) is not None:
            setattr(config, name, min(value, size))
        elif isinstance(value, list) and len(value) in depths and len(value) > LAYERS:
            setattr(config, name, _of_each_kind(value))
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif name.endswith("token_id") and _is_size(value) and value >= VOCABULARY:
            setattr(config, name, VOCABULARY - 1)
        elif name == "use_cache":
            setattr(config, name, False)
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] in (None, fields.get("num_attention_heads")):
        config.num_key_value_heads = HEADS  # as many as there are others: not grouped
    if "head_dim" in fields and fields["head_dim"] is None:
        config.head_dim = HEAD_SIZE
    if "expand" in fields and "num_heads" in fields:
        config.num_heads = config.expand * HIDDEN // HEAD_SIZE  # of a state space, which is wider than what enters it
    if "num_experts_per_tok" in fields and fields["num_experts_per_tok"] is None:
        config.num_experts_per_tok = 2


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size_for(name: str) -> int | None:
    return next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), None)


def _of_each_kind(entries: list[Any]) -> list[Any]:
    """As many entries as there are layers, of different kinds if there are any."""
    kinds = list(dict.fromkeys(map(str, entries)))
    firsts = [next(entry for entry in entries if str(entry) == kind) for kind in kinds]
    return (firsts + entries)[:LAYERS]
