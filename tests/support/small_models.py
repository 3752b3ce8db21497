"""Small language models for tests: a hand-written GPT, and those of transformers as they are."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention, with q, k and v from one projection or from three."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width) if fused else None
        self.q, self.k, self.v = (None if fused else nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        apart = [p(x) for p in (self.q, self.k, self.v) if p is not None]
        parts = apart if self.qkv is None else self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT whose forward returns the loss."""

    def __init__(
        self,
        *,
        vocabulary: int = 96,
        width: int = 24,
        heads: int = 4,
        length: int = 12,
        layers: int = 2,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def hf_gpt2(
    *,
    vocabulary: int = 96,
    width: int = 24,
    heads: int = 4,
    length: int = 12,
    layers: int = 2,
    dropout: float = 0.0,
) -> nn.Module:
    """transformers' GPT-2, randomly initialised."""
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config)


def hf_llama(
    *, vocabulary: int = 96, width: int = 24, heads: int = 4, kv_heads: int = 2, length: int = 12, layers: int = 2
) -> nn.Module:
    """transformers' Llama, randomly initialised."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def hf_gemma(*, layers: int = 2) -> nn.Module:
    """transformers' Gemma 3, randomly initialised; every other layer attends to a window."""
    config = transformers.Gemma3TextConfig(
        vocab_size=96,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=layers,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        sliding_window=4,
        use_cache=False,
    )
    return transformers.Gemma3ForCausalLM(config)


def tokens() -> Tensor:
    """A batch of random tokens that these models take: (2, 12)."""
    return torch.randint(96, (2, 12))


def labelled() -> dict[str, Tensor]:
    """The arguments of those of transformers."""
    return {"input_ids": tokens(), "labels": tokens()}


def hf_mixtral(
    *, vocabulary: int = 96, width: int = 24, experts: int = 4, length: int = 12, router_loss: float = 0.0
) -> nn.Module:
    """transformers' Mixtral, randomly initialised; its tokens go to two experts each.

    router_loss: the weight of the loss of an uneven load of the experts; without it, that is not computed.
    """
    config = transformers.MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        output_router_logits=router_loss > 0,
        router_aux_loss_coef=router_loss,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return transformers.MixtralForCausalLM(config)
