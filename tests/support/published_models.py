"""The sizes of models in publications, to plan for and to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """A GPT: its number of layers, its hidden size, and its attention heads."""

    num_layers: int
    hidden: int
    num_heads: int

    @property
    def num_parameters(self) -> int:
        """Of the matrices in its layers: 12 times hidden x hidden in each."""
        return 12 * self.num_layers * self.hidden**2


GPTS: Mapping[str, TransformerSize] = {
    "GPT-5B": TransformerSize(24, 4096, 32),
    "GPT-10B": TransformerSize(32, 5120, 40),
    "GPT-20B": TransformerSize(32, 7168, 56),
    "GPT-40B": TransformerSize(38, 9216, 72),
    "GPT-80B": TransformerSize(42, 12288, 96),
}
"""The transformers of Singh et al., section 6, which train on 4 million tokens a step in sequences of 2,048."""
