"""Models of transformers that have a loss of their own, by what they are called with."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.survey.heads.head import ROWS, Batch, Head
from fxpar.survey.heads.tiny_config import CHANNELS, IMAGE, PATCH, SHRINKINGS, VOCABULARY, Shrinking, shrink

LENGTH = 16
"""Of a sequence of tokens."""

FRAMES, SAMPLES = 64, 2048
"""Of speech: enough for what is left of it after the strides of the feature encoders."""

_BINS = ("num_mel_bins", "feature_size", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
"""What models call the number of values that a frame of a spectrum has."""


LARGEST = 50_000_000
"""Parameters of a model; larger ones are not tried."""


def _names(mapping: str) -> Mapping[str, str | tuple[str, ...]]:
    """The classes of the models with a head, by family."""
    from transformers.models.auto import modeling_auto

    names: Mapping[str, str | tuple[str, ...]] = getattr(modeling_auto, mapping)
    return names


def _builds(mapping: str, name: str) -> Iterator[Callable[[], nn.Module]]:
    for shrinking in SHRINKINGS:
        yield partial(_build, mapping, name, shrinking)


def _build(mapping: str, name: str, shrinking: Shrinking) -> nn.Module:
    import transformers

    config = transformers.CONFIG_MAPPING[name]()
    shrink(config, shrinking)
    if mapping == _CAUSAL and hasattr(config, "is_decoder"):
        config.is_decoder = True  # of an encoder
    classes = _names(mapping)[name]
    make = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    if not isinstance(config, make.config_class):
        config = _part_for(make, config)  # of a family that sees or hears, too
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"it cannot be made smaller than {size:,} parameters by the names of its fields")
    model: nn.Module = make(config)
    return model


def _part_for(make: Any, config: Any) -> Any:
    """The configuration in `config` that the class takes; that of what reads text where none is of this type."""
    return next((each for each in vars(config).values() if isinstance(each, make.config_class)), None) or (
        config.get_text_config()
    )


def _tokens(model: nn.Module, length: int = LENGTH) -> Tensor:
    vocabulary = min(VOCABULARY, _field(model, "vocab_size", VOCABULARY))
    return torch.randint(4, vocabulary, (ROWS, length))  # the first ones are often special, such as padding


def _causal(model: nn.Module) -> Iterator[Batch]:
    tokens = _tokens(model)
    batch = {"input_ids": tokens, "labels": tokens}
    yield batch
    for images in _images(model):
        yield {**batch, **images}


def _masked(model: nn.Module) -> Iterator[Batch]:
    yield {"input_ids": _tokens(model), "labels": _tokens(model)}


def _sequences(model: nn.Module) -> Iterator[Batch]:
    batch = {"input_ids": _tokens(model), "labels": _tokens(model, LENGTH // 2)}
    yield batch
    yield {**batch, "decoder_input_ids": _tokens(model, LENGTH // 2)}
    yield from _causal(model)


def _classified(model: nn.Module) -> Iterator[Batch]:
    """Images or sounds, each with a class."""
    labels = torch.randint(0, 2, (ROWS,))
    for given in (*_images(model), *_sounds(model)):
        yield {**given, "labels": labels}
    if "pixel_values" not in _called_with(model):
        yield {"input_ids": _tokens(model), "labels": labels}


def _transcribed(model: nn.Module) -> Iterator[Batch]:
    labels = _tokens(model, 4)
    for given in _sounds(model):
        yield {**given, "labels": labels}
        yield {**given, "labels": labels, "decoder_input_ids": _tokens(model, 4)}
    if "input_ids" in _called_with(model):
        yield from _causal(model)


def _images(model: nn.Module) -> Iterator[Batch]:
    if "spatial_shapes" in _called_with(model):  # images of any shape, as sequences of patches
        values = _field(model, "num_channels", CHANNELS) * _field(model, "patch_size", PATCH) ** 2
        yield {
            "pixel_values": torch.randn(ROWS, LENGTH, values),
            "pixel_attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long),
            "spatial_shapes": torch.full((ROWS, 2), math.isqrt(LENGTH)),
        }
    elif "pixel_values" in _called_with(model):
        for size in (_size_of_images(model), 2 * IMAGE, 4 * IMAGE):
            yield {"pixel_values": torch.randn(ROWS, _field(model, "num_channels", CHANNELS), size, size)}


def _sounds(model: nn.Module) -> Iterator[Batch]:
    if "input_values" in _called_with(model):
        yield {"input_values": torch.randn(ROWS, SAMPLES)}
    for given in _spectra(model):
        yield given
        yield {**given, "attention_mask": torch.ones(ROWS, next(iter(given.values())).shape[1], dtype=torch.long)}


def _spectra(model: nn.Module) -> Iterator[Batch]:
    name = next((name for name in ("input_features", "input_values") if name in _called_with(model)), None)
    if name is None:
        return
    found = [_field(model, field, None) for field in _BINS]
    frames = _field(model, "max_source_positions", None)
    for bins in dict.fromkeys(each for each in (*found, 80) if each is not None):
        for length in (FRAMES, *(() if frames is None else (2 * frames,))):
            yield {name: torch.randn(ROWS, length, bins)}
            yield {name: torch.randn(ROWS, bins, length)}


def _called_with(model: nn.Module) -> Iterable[str]:
    return inspect.signature(model.forward).parameters


def _field(model: nn.Module, name: str, default: Any) -> Any:
    """A field of the model's configuration, or of one that it contains."""
    config: Any = model.config
    for each in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        if (found := getattr(each, name, None)) is not None:
            return found
    return default


def _size_of_images(model: nn.Module) -> int:
    size = _field(model, "image_size", IMAGE)
    return int(size if isinstance(size, int) else size[0])


def _head(mapping: str, batches: Callable[[nn.Module], Iterable[Batch]]) -> Head:
    return Head(partial(_names, mapping), partial(_builds, mapping), batches)


_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

HEADS: Mapping[str, Head] = {
    "causal-lm": _head(_CAUSAL, _causal),
    "masked-lm": _head("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _masked),
    "seq2seq": _head("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _sequences),
    "image": _head("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _classified),
    "audio": _head("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _classified),
    "ctc": _head("MODEL_FOR_CTC_MAPPING_NAMES", _transcribed),
    "speech": _head("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _transcribed),
}
"""The heads, by transformers' table of the models that have one."""
