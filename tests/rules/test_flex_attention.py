"""Flex attention is sharded by batch and heads, whatever its graphs read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_calls import Call, calls_in
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from fxpar.cache.encode import decode, encode
from fxpar.ir.flex_attention import FlexCall
from fxpar.ir.layout import Partial, Shard
from fxpar.rules.prove import prove, prove_two_axes
from fxpar.rules.rule import Strategy
from tests.support.joint_graphs import joint_graph

ROWS, LENGTH = 4, 4


class Attend(nn.Module):
    """Flex attention with what depends on rows and heads: a mask, and a learned bias; the loss is of both results."""

    def __init__(self, heads: int, kv_heads: int, mask_rows: int | None, mask_heads: int | None) -> None:
        super().__init__()
        self.mask_sizes = mask_rows, mask_heads
        self.query = nn.Parameter(torch.randn(ROWS, heads, LENGTH, 4))
        self.key, self.value = (nn.Parameter(torch.randn(ROWS, kv_heads, LENGTH, 4)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(heads, LENGTH))

    def forward(self, documents: Tensor) -> Tensor:
        rows, heads = self.mask_sizes
        bias = self.bias

        def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            seen = q_idx >= kv_idx
            seen = seen & (documents[b, q_idx] == documents[b, kv_idx]) if rows else seen
            return seen & (q_idx - kv_idx <= h) if heads else seen

        def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + bias[h, q_idx - kv_idx] * (b + 1)

        blocks = create_block_mask(mask, rows, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=2)
        attended = flex_attention(
            self.query,
            self.key,
            self.value,
            score_mod=biased,
            block_mask=blocks,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        out, statistics = attended
        assert statistics.lse is not None
        return out.square().mean() + statistics.lse.mean()


SIZES = {
    "a mask of rows and heads": (4, 4, ROWS, 4),
    "grouped queries": (4, 2, ROWS, None),
    "one head of keys": (4, 1, None, None),
    "three heads": (3, 3, None, 3),
}


def calls(*sizes: Any) -> tuple[Call, Call]:
    """The calls of flex attention and of its backward, on random values."""
    torch.manual_seed(0)
    model = Attend(*sizes)
    documents = torch.arange(LENGTH).expand(ROWS, -1) // (torch.arange(ROWS)[:, None] + 1)
    joint = joint_graph(model, documents)
    values = dict(model.named_parameters())
    given = [values.get(port.name, documents).detach() for port in joint.inputs] + [
        torch.ones(()) for _ in joint.tangents
    ]
    forward, backward = (call for call in calls_in(joint.module, given) if isinstance(call.target, FlexCall))
    return forward, backward


@pytest.mark.parametrize("case", SIZES)
def test_batch_and_heads_are_free(case: str) -> None:
    for call in calls(*SIZES[case]):
        proved = prove(*call, 2)
        assert with_query(proved, Shard(0, 2))
        assert with_query(proved, Shard(1, 2))


def with_query(strategies: list[Strategy], shard: Shard) -> list[Strategy]:
    return [strategy for strategy in strategies if strategy.inputs[0] == shard]


def test_rows_and_heads_are_free_for_several_axes_at_once() -> None:
    for call in calls(*SIZES["grouped queries"]):
        assert prove_two_axes(*call, 2) > 4


def test_ranks_compute_terms_of_what_heads_share() -> None:
    """The gradients of the one head of keys and values, and of a buffer."""
    _, backward = calls(*SIZES["one head of keys"])
    (by_heads,) = with_query(prove(*backward, 2), Shard(1, 2))
    assert by_heads.outputs == (Shard(1, 2), Partial(), Partial(), Partial())


def test_calls_come_back_from_bytes() -> None:
    for target, args, _ in calls(*SIZES["grouped queries"]):
        again = decode(encode(target))
        assert str(again) == str(target)
        torch.testing.assert_close(again(*args), target(*args), rtol=0, atol=0)


def test_calls_have_the_same_name_if_they_compute_the_same() -> None:
    """Whatever their graphs call their nodes, which differs from trace to trace."""
    one, again, other = (
        calls(*sizes)[0].target for sizes in (SIZES["three heads"], SIZES["three heads"], (3, 3, 4, 3))
    )
    assert str(one) == str(again) != str(other)
