"""Models of transformers that have a loss of their own, by what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.survey.heads.head import ROWS, Batch, Head
from fxpar.survey.heads.tiny_config import CHANNELS, IMAGE, VOCABULARY, shrink

LENGTH = 16
"""Of a sequence of tokens."""

FRAMES, SAMPLES = 64, 2048
"""Of speech: enough for what is left of it after the strides of the feature encoders."""


def _build(auto_class: str, name: str) -> nn.Module:
    import transformers

    config = transformers.CONFIG_MAPPING[name]()
    shrink(config)
    model: nn.Module = getattr(transformers, auto_class).from_config(config)
    return model


def _names(mapping: str) -> Iterable[str]:
    from transformers.models.auto import modeling_auto

    names: Mapping[str, str] = getattr(modeling_auto, mapping)
    return names


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(4, VOCABULARY, (ROWS, length))  # the first ones are often special, such as padding


def _causal(model: nn.Module) -> Iterator[Batch]:
    tokens = _tokens()
    yield {"input_ids": tokens, "labels": tokens}


def _masked(model: nn.Module) -> Iterator[Batch]:
    yield {"input_ids": _tokens(), "labels": _tokens()}


def _sequences(model: nn.Module) -> Iterator[Batch]:
    batch = {"input_ids": _tokens(), "labels": _tokens(LENGTH // 2)}
    yield batch
    yield {**batch, "decoder_input_ids": _tokens(LENGTH // 2)}


def _classified(model: nn.Module) -> Iterator[Batch]:
    """Images or sounds, each with a class."""
    labels = torch.randint(0, 2, (ROWS,))
    for given in (*_images(model), *_sounds(model)):
        yield {**given, "labels": labels}


def _transcribed(model: nn.Module) -> Iterator[Batch]:
    labels = _tokens(4)
    for given in _sounds(model):
        yield {**given, "labels": labels}
        yield {**given, "labels": labels, "decoder_input_ids": _tokens(4)}


def _images(model: nn.Module) -> Iterator[Batch]:
    if "pixel_values" in _called_with(model):
        for size in (_size_of_images(model), 2 * IMAGE, 4 * IMAGE):
            yield {"pixel_values": torch.randn(ROWS, _field(model, "num_channels", CHANNELS), size, size)}


def _sounds(model: nn.Module) -> Iterator[Batch]:
    if "input_values" in _called_with(model):
        yield {"input_values": torch.randn(ROWS, SAMPLES)}
    if "input_features" in _called_with(model):
        bins = _field(model, "num_mel_bins", _field(model, "feature_size", 80))
        yield {"input_features": torch.randn(ROWS, FRAMES, bins)}
        yield {"input_features": torch.randn(ROWS, bins, FRAMES)}


def _called_with(model: nn.Module) -> Iterable[str]:
    import inspect

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


def _head(auto_class: str, mapping: str, batches: Callable[[nn.Module], Iterable[Batch]]) -> Head:
    return Head(partial(_names, mapping), partial(_build, auto_class), batches)


HEADS: Mapping[str, Head] = {
    "causal-lm": _head("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _causal),
    "masked-lm": _head("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _masked),
    "seq2seq": _head("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _sequences),
    "image": _head("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _classified),
    "audio": _head("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _classified),
    "ctc": _head("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES", _transcribed),
    "speech": _head("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _transcribed),
}
"""The heads, by the class that makes a model with one."""
