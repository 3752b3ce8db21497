"""Notation of scaled dot product attention, forward and backward, in all of PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxpar.ir import node_meta
from fxpar.rules.call import argument, has_parameter
from fxpar.rules.rule import OpCall


def attention(template: str, queries: str = "s") -> Callable[[OpCall], str | None]:
    """Notation of a kernel whose operands and results are named in `template`.

    {q}: batch, heads, queries, features. {kv}: the same of keys. {rows}: batch, heads, queries. {mask}: what is
    added to the scores. Batch and heads may be sharded; so may the queries, unless `queries` is "S" or the attention
    is causal, which depends on their positions.
    """

    def written(call: OpCall) -> str | None:
        if argument(call, "dropout_p") != 0:
            return None  # ranks would draw another dropout mask than the whole op
        s = "S" if argument(call, "is_causal") else queries
        query, key = node_meta.tensor(argument(call, "query")), node_meta.tensor(argument(call, "key"))
        heads_of_keys = "1" if key.shape[1] == 1 else "h"  # multi-query: one head of keys for all
        mask = _mask(call, query, key, ["b", "h", s, "T"])
        return template.format(q=f"b h {s} D", kv=f"b {heads_of_keys} T D", rows=f"b h {s}", mask=mask)

    return written


def _mask(call: OpCall, query: Tensor, key: Tensor, names: list[str]) -> str:
    """The mask's dims, some of which may be broadcast to those of the scores."""
    given = [argument(call, name) for name in ("attn_mask", "attn_bias") if has_parameter(call, name)]
    if not given or given[0] is None:
        return "_"
    (node,) = given
    shape = node_meta.tensor(node).shape
    scores = (*query.shape[:3], key.shape[2])
    added = len(scores) - len(shape)
    own = list(zip(shape, scores[added:], names[added:], strict=True))
    return " ".join(name if size == whole else "1" for size, whole, name in own)


def attention_without_bias_gradient(template: str) -> Callable[[OpCall], str | None]:
    """The same for a backward that can also return the gradient of the bias, for calls that do not ask for it."""
    written = attention(template, queries="S")
    return lambda call: None if argument(call, "grad_input_mask")[3] else written(call)
