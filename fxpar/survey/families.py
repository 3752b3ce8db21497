"""The families of transformers' models that have a head with a loss, each as a tiny random model and its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.survey.tiny_config import VOCABULARY, shrink

BATCH, LENGTH = 8, 16


@dataclass(frozen=True, slots=True)
class Family:
    """A family, by its `model_type`, and one of its heads."""

    name: str
    head: str

    def build(self) -> nn.Module:
        """A tiny model with random weights, in training mode.

        Raises:
            and whatever its configuration or model does, if its sizes do not fit together.
        """
        import transformers

        config = transformers.CONFIG_MAPPING[self.name]()
        shrink(config)
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, HEADS[self.head]).from_config(config)
        return model.train()

    def arguments(self, rows: int = BATCH) -> dict[str, Any]:
        """Arguments of its forward for a batch of so many rows."""
        torch.manual_seed(1)
        tokens = _tokens(rows)
        return {"input_ids": tokens, "labels": _tokens(rows) if self.head == "masked-lm" else tokens}


HEADS: Mapping[str, str] = {"causal-lm": "AutoModelForCausalLM", "masked-lm": "AutoModelForMaskedLM"}
"""The heads that are tried, and the class that makes a model with one."""


def _tokens(rows: int) -> Tensor:
    return torch.randint(4, VOCABULARY, (rows, LENGTH))  # the first ones are often special, such as padding


def all_families() -> Iterator[Family]:
    """All families of the installed transformers, by head and name."""
    from transformers.models.auto import modeling_auto

    heads = {
        "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    for head, names in heads.items():
        yield from (Family(name, head) for name in names)
