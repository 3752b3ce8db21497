"""Attention that drops weights out becomes ops that draw by logical index; other attention stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxpar.ir.attention_dropout import attention_by_definition, define_attention_dropout
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.support.captures import captured

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default


class Attention(nn.Module):
    def __init__(self, dropout: float, **options: bool) -> None:
        super().__init__()
        self.mix, self.dropout, self.options = nn.Linear(8, 24), dropout, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, **self.options).mean()


def targets(model: nn.Module) -> list[object]:
    capture, _ = captured(model, (torch.randn(2, 5, 8),))
    (stage,) = split_stages(capture, [])
    return [node.target for node in trace_joint(stage, with_backward=True).module.graph.nodes]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_only_attention_with_dropout_is_taken_apart(options: dict[str, bool]) -> None:
    assert FUSED in targets(Attention(0.0, **options))
    dropping = targets(Attention(0.1, **options))
    assert FUSED not in dropping and aten.native_dropout.default in dropping


def test_the_definition_has_no_fused_kernel_even_where_there_is_one() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    traced = make_fx(attention_by_definition)(q, k, v)
    assert FUSED not in [node.target for node in traced.graph.nodes]
    assert torch.allclose(traced(q, k, v), F.scaled_dot_product_attention(q, k, v), atol=1e-6)


@pytest.mark.parametrize(("given", "replaced"), [((None, 0.1), True), ((None, 0.0), False), ((), False)])
def test_dropout_may_be_given_by_position(given: tuple[object, ...], replaced: bool) -> None:
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    graph.output(graph.call_function(F.scaled_dot_product_attention, (*operands, *given)))
    module = fx.GraphModule({}, graph)
    define_attention_dropout(module)
    assert bool(module.graph.find_nodes(op="call_function", target=attention_by_definition)) == replaced
