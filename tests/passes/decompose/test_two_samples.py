"""A graph for one sample becomes the graph that the same program has for two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.decompose.two_samples import for_two_samples
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.support.captures import captured
from tests.support.halves import decomposed

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda x: x.flatten().sum(),
    "flattened after a slice": lambda x: x[:, 1:].reshape(-1).sum(),
    "split dims": lambda x: x.view(len(x), 2, 2, 3).sum((1, 2)).sum(),
    "sizes of one": lambda x: x.view(len(x), 1, 1, 12).sum(-1).sum(),
    "merged with the next dim": lambda x: x.view(len(x) * 4, 3).sum(0).sum(),
    "behind others": lambda x: x.transpose(0, 1).reshape(4, -1).sum(),
    "expanded": lambda x: (x[:, None].expand(len(x), 2, 4, 3) * torch.ones(2, 4, 3)).sum(),
    "broadcast": lambda x: (x[:, :, None] == x[:, None]).sum(),
}


class Program(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run, self.scale = run, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * self.scale


def forward_of(run: Callable[[Tensor], Tensor], samples: int) -> JointGraph:
    capture, _ = captured(Program(run), (torch.zeros(samples, 4, 3),))
    (stage,) = split_stages(capture, [])
    return decomposed(trace_joint(stage, with_backward=False))


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_has_the_shapes_of_a_trace_for_two(name: str) -> None:
    one, two = (forward_of(PROGRAMS[name], samples) for samples in (1, 2))
    longer, copies = for_two_samples(one, {Port(PortKind.INPUT, "0"): 0})
    # What one sample has in a row is copied for two.
    of_two = [node for node in two.module.graph.nodes if node.target is not torch.ops.aten.clone.default]
    for found, expected in zip(longer.module.graph.nodes, of_two, strict=True):
        if found.op != "output":
            assert tensor(found).shape == tensor(expected).shape, found.format_node()
    assert list(copies.values()) == list(longer.module.graph.nodes)


def test_an_op_that_takes_no_other_sizes_raises() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros(1, 4, 3)], 1).sum()

    with pytest.raises(RuntimeError):
        for_two_samples(forward_of(run, 1), {Port(PortKind.INPUT, "0"): 0})
