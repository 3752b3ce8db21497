"""A GPT in plain PyTorch. It knows nothing of fxpar, nor of how many processes will train it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model; the defaults make 10 million parameters that read and write bytes."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 8
    heads: int = 8
    hidden: int = 320
    tied: bool = False
    """Whether the embedding and the head share one weight."""


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        queries, keys, values = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    """Two linear layers with a hidden dim four times as wide."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.hidden, 4 * config.hidden)
        self.out = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.fc(x)))


class Block(nn.Module):
    """One layer: attention and an MLP, each after a norm and around a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A language model whose forward returns the mean loss of predicting `targets`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.apply(init_weights)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (batch, length) of int64 -> the loss, a scalar."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init_weights(module: nn.Module) -> None:
    """Small normal weights, as in GPT-2, so that the first loss is that of a uniform guess."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
