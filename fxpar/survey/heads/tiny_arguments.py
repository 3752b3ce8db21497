"""Arguments of the classes of diffusers' models that make small ones: by the names of the parameters alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fxpar.survey.heads.sizes import is_size, size_for

LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, TEXT_LENGTH = 2, 4, 2, 16, 6
HIDDEN = HEADS * HEAD_SIZE
CHANNELS = HIDDEN // 2, HIDDEN
"""Of the levels of a network of convolutions: also of what has no setting for the 32 groups of its norms."""

_KEPT = r"(in|out)_(visual_|audio_)?|\w*latent_|\w*class_embeddings_input_|addition_time_embed_"
"""Of samples, and what is a multiple of another size."""

_COUNTS: Mapping[str, int] = {
    r".*per_(mid_)?block|.*res_blocks|num_(enc|dec|encoder|decoder)_blocks|.*stage_depths|.*num_layers_per_block": 1,
    r".*layers|n_?layers|.*depths?|.*every_n|.*_blocks": LAYERS,
    r".*(key_value|kv)\w*heads": KEY_VALUE_HEADS,
    r".*heads": HEADS,
    r".*head_dim|.*dim_heads?|d_kv|rotary_dim": HEAD_SIZE,
    r".*ffn?_(hidden_|inner_)?(dim|size)\w*|d_ff|.*intermediate_(size|dim)": 2 * HIDDEN,
    r"ch|channels|\w+_input_channels|(decoder_)?base_(dim|channels)|(enc|dec|encoder|decoder)_(dim|channels)": HIDDEN
    // 2,
    rf"(?!({_KEPT})dim$)(\w*_)?dim\w*|d_model|.*hidden_size": HIDDEN,
    r".*(caption|cond|conditioning|text|pooled|expand|initial|approximator|states)\w*_channels?": HIDDEN,
    r"upsample_initial_channel": HIDDEN,
    r"(?!sampl|num_emb)\w*vocab_size|.*codebook_size|num_vector_embeds|num_vq_embeddings|num_embeds_ada_norm": 96,
    r"(?!gist)\w*text_len\w*|.*text_seq_length|max_sequence_length|num_embeddings": TEXT_LENGTH,
    r"sample_(size|height|width)|image_size|resolution": 16,
    r"sample_frames|video_length": 5,
    r"pos_embed_max_size": 32,
    r"num_(routed_)?experts": 4,
    r"num_activated_experts": 2,
    r"(.*norm_)?(num_)?groups": 8,
    r"spatial_compression_ratio": 2,
    r".*window|multiple_of": 8,
    r".*token_id": 95,
}
"""Patterns of names, and the number that such a parameter, or each entry of it, gets if its default is larger."""

_LEVELS = r".*(block_out_channels|stage_channels|mults?|multiples|multipliers|rates|ratios|strides|block_types)"
"""Names of what has an entry for each level of a network that makes images smaller, or larger."""

_WITHOUT_DEFAULT: Mapping[str, Any] = {
    "in_channels": 8,
    "patch_size": 2,
    "caption_channels": HIDDEN,
    "num_kv_heads": HEADS,
    "axes_dim": (HEAD_SIZE // 2, HEAD_SIZE // 2),
    "out_channels": 8,
    "latent_channels": 4,
    "block_out_channels": CHANNELS,
    "layers_per_block": 1,
    "spatial_compression_ratio": 2,
    "sample_size": 16,
}


def tiny_arguments(init: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Keyword arguments for a class's `__init__`, most likely first: its defaults shrunk, with ever more that is None.

    There are only arguments that differ from their defaults.
    """
    parameters = list(inspect.signature(init).parameters.values())[1:]
    defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    required = {each.name for each in parameters} - set(defaults)
    chosen = _shrunk(defaults)
    chosen |= {name: value for name, value in _WITHOUT_DEFAULT.items() if name in required}
    yield dict(chosen)
    for name, value in _WITHOUT_DEFAULT.items():
        if name in defaults and defaults[name] is None:
            chosen[name] = value
            yield dict(chosen)


def _shrunk(defaults: Mapping[str, Any]) -> dict[str, Any]:
    levels = next((len(each) for name, each in defaults.items() if _is_list(each) and re.fullmatch(_LEVELS, name)), 0)
    shrunk = {name: _shrink(name, value, levels, defaults) for name, value in defaults.items()}
    return {name: value for name, value in shrunk.items() if value != defaults[name]}


def _shrink(name: str, value: Any, levels: int, defaults: Mapping[str, Any]) -> Any:
    if _is_list(value):
        if re.fullmatch(r"m?rope_(dim\w*|section|axes_dim)|axes_dims?\w*|mrope_section", name):
            return _parts_of_head(value, _head_size(defaults))
        if re.fullmatch(r".*(layer_ids|(?<!per)(?<!num)_layers)", name):
            return type(value)(range(min(LAYERS, len(value))))
        entries = _few(name, value, levels) if not any(isinstance(each, float) for each in value) else value
        if re.fullmatch(r".*(block_out_channels|stage_channels)", name):
            return type(value)(CHANNELS[-1] if each == max(entries) else CHANNELS[0] for each in entries)
        return type(value)(_smaller(name, each) for each in entries)
    if re.fullmatch(r".*(key_value|kv)\w*heads", name) and value in _heads(defaults):
        return HEADS
    return _smaller(name, value)


def _few(name: str, entries: Any, levels: int) -> Any:
    """The first and the last of as many entries as there are levels; as many are left out of all others for levels.

    Of what channels are multiplied by the first ones are kept, so that neighbours are as far apart as they were.
    """
    extra = max(levels - LAYERS, 0)
    if not extra or len(entries) < levels - 1:
        return entries
    kept = len(entries) - extra
    if "mult" in name:
        return entries[:kept]
    return entries[: kept // 2 + kept % 2] + entries[len(entries) - kept // 2 :]


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, float) and "drop" in name:
        return 0.0
    size = size_for(name, _COUNTS) if is_size(value) else None
    return value if size is None else min(value, size)


def _parts_of_head(parts: Any, head_size: int) -> Any:
    """Parts of a head, each even, with the same sum as before in proportion to the head's size."""
    total = sum(parts)
    wanted = total * HEAD_SIZE // (head_size or total)
    smaller = [max(2, wanted * each // total // 2 * 2) for each in parts]
    smaller[-1] += wanted - sum(smaller)
    return type(parts)(smaller)


def _head_size(defaults: Mapping[str, Any]) -> int:
    for name in ("attention_head_dim", "head_dim"):
        if isinstance(defaults.get(name), int):
            return int(defaults[name])
    widths = [defaults[name] for name in ("hidden_size", "dim") if isinstance(defaults.get(name), int)]
    heads = _heads(defaults)
    return widths[0] // heads[0] if widths and heads else 0


def _heads(defaults: Mapping[str, Any]) -> list[int]:
    named = (defaults.get(name) for name in ("num_attention_heads", "n_heads", "num_heads", "text_num_attention_heads"))
    return [each for each in named if isinstance(each, int)]


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
