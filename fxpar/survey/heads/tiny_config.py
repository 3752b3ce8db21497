"""Configurations of transformers' models that are as small as they can be: by the names of their fields alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fxpar.survey.heads.sizes import is_size, size_for

VOCABULARY, LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_SIZE = 96, 2, 4, 2, 8
HIDDEN = HEADS * HEAD_SIZE
IMAGE, PATCH, CHANNELS = 16, 4, 3

_LAYERS = r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(encoder|decoder)_layers"

_COUNTS: Mapping[str, int] = {
    r"vocab_size|.*_vocab_size|vocab_size_.*": VOCABULARY,
    _LAYERS: LAYERS,
    r"num_experts|n_routed_experts|num_local_experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": 2,
    r"n_group|num_expert_groups?|topk_group": 1,
    r"num_kv_shared_layers": 0,
    r"mask_(time|feature)_length": 2,
}
"""How many there are: patterns of names, and the number that a field of such a name gets if it is larger."""

_LENGTHS: Mapping[str, int] = {
    r"n_positions|max_position_embeddings|max_.*positions|n_ctx|seq_length|max_seq_len|max_length": 64,
    r"image_size": IMAGE,
    r"patch_size": PATCH,
    r"sliding_window|attention_window|local_attention.*|window_size": 8,
    r"depths?|num_block_repeats|layer_depths": LAYERS,
}
"""Likewise of lengths, and of the depths of the stages of models that halve the length from one to the next."""

_WIDTHS: Mapping[str, int] = {
    r"hidden_size|d_model|n_embd|dim|hidden_dim|emb(ed)?_dim|embedding_size|.*_hidden_size|word_embed_proj_dim": HIDDEN,
    r"(moe_|shared_)?(expert_)?intermediate_size(_mlp)?|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim": 2 * HIDDEN,
    r"num_attention_heads|n_heads?|num_heads|.*_attention_heads": HEADS,
    r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num": KEY_VALUE_HEADS,
    r"head_dim|d_kv|.*_head_dim|attention_head_size": HEAD_SIZE,
    r"(n_)?mamba_(n_|num_)?heads": HEADS * 2,
    r"mamba_(d_head|headdim)": HEAD_SIZE,
    r"mamba_d_ssm": 2 * HIDDEN,
    r"rotary_dim": HEAD_SIZE // 2,
    r"kv_lora_rank|q_lora_rank": 16,
}
"""Likewise of widths, where each is set to one of its own."""

_SCALED = (
    r"hidden_sizes?|d_model|n_embd|dim|hidden_dim|emb(ed)?_dims?|embedding_size|.*_hidden_sizes?|word_embed_proj_dim|"
    r"conv_dim|tdnn_dim|out_channels|in_channels|classifier_proj_size|xvector_output_dim|"
    r"(moe_|shared_)?(expert_)?intermediate_size(_mlp)?|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim"
)
"""Names of widths that are divided by `_SCALE`, where widths keep their relations to each other and to heads."""

_SCALE = 8


@dataclass(frozen=True, slots=True)
class Shrinking:
    """What of a configuration shrinks besides counts, such as the number of layers.

    widths: they are set to what fits one another in most models; or divided by one number; or kept.
    lengths: whether sizes of images, windows and stages shrink.
    """

    widths: Literal["set", "scaled", "kept"]
    lengths: bool


SHRINKINGS = (Shrinking("set", True), Shrinking("scaled", True), Shrinking("scaled", False), Shrinking("kept", False))
"""Those that are tried, smallest models first."""


def shrink(config: Any, how: Shrinking = SHRINKINGS[0]) -> None:
    """Make the sizes of a configuration, and of those in it, small, in place.

    Lists with an entry for each layer keep the first entries of each kind. Dropout is off, and there is no cache.
    """
    fields = dict(vars(config))
    depths = {value for name, value in fields.items() if re.fullmatch(_LAYERS, name) and is_size(value)}
    for name, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, how)
        elif isinstance(value, list) and len(value) in depths and len(value) > LAYERS:
            setattr(config, name, _of_each_kind(value))
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif name.endswith("token_id") and is_size(value) and value >= VOCABULARY:
            setattr(config, name, VOCABULARY - 1)
        elif name in ("use_cache", "apply_spec_augment"):
            setattr(config, name, False)
        elif (smaller := _smaller(name, value, how)) != value:
            setattr(config, name, smaller)
    if how.widths == "set":
        _relate(config, fields)
    _complete(config, fields)


def _smaller(name: str, value: Any, how: Shrinking) -> Any:
    """A size, or sizes in a list, made smaller if the name says what it is of."""
    if isinstance(value, list | tuple):
        return type(value)(_smaller(name, each, how) for each in value)
    if not is_size(value):
        return value
    tables = {**_COUNTS, **(_LENGTHS if how.lengths else {}), **(_WIDTHS if how.widths == "set" else {})}
    size = size_for(name, tables)
    if size is None and how.widths != "kept" and re.fullmatch(_SCALED, name):
        return max(value // _SCALE, 1)
    return value if size is None else min(value, size)


def _relate(config: Any, fields: Mapping[str, Any]) -> None:
    """Set what widths imply, where a configuration leaves it open or says it once more."""
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] in (None, fields.get("num_attention_heads")):
        config.num_key_value_heads = HEADS  # as many as there are others: not grouped
    if "head_dim" in fields and fields["head_dim"] is None:
        config.head_dim = HEAD_SIZE
    if "expand" in fields and "num_heads" in fields:
        config.num_heads = config.expand * HIDDEN // HEAD_SIZE  # of a state space, which is wider than what enters it
    if "qk_head_dim" in fields and "qk_nope_head_dim" in fields:
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim


def _complete(config: Any, fields: Mapping[str, Any]) -> None:
    """Set what a configuration leaves open, but its model needs."""
    missing = {name for name, value in fields.items() if value is None}
    if "num_experts_per_tok" in missing:
        config.num_experts_per_tok = 2
    if "default_language" in missing and fields.get("languages"):
        config.default_language = fields["languages"][0]
    if "vocab_size" in missing:
        config.vocab_size = VOCABULARY
        config.pad_token_id = 0


def _of_each_kind(entries: list[Any]) -> list[Any]:
    """As many entries as there are layers, of different kinds if there are any."""
    kinds = list(dict.fromkeys(map(str, entries)))
    firsts = [next(entry for entry in entries if str(entry) == kind) for kind in kinds]
    return (firsts + entries)[:LAYERS]
