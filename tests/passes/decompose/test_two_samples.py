"""A graph for one sample becomes the graph that the same program has for two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpar.costs.dataflow import Operation, Value, operations
from fxpar.ir.layout import Shard
from fxpar.ir.samples import Samples
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.decompose.sample_positions import samples_of_results
from fxpar.passes.decompose.two_samples import OneSampleError, inputs_for_two, operations_for_two
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.support.captures import captured
from tests.support.halves import decomposed

INPUT = Port(PortKind.INPUT, "0")

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda x: x.flatten().sum(),
    "flattened after a slice": lambda x: x[:, 1:].reshape(-1).sum(),
    "split dims": lambda x: x.view(len(x), 2, 2, 3).sum((1, 2)).sum(),
    "sizes of one": lambda x: x.view(len(x), 1, 1, 12).sum(-1).sum(),
    "merged with the next dim": lambda x: x.view(len(x) * 4, 3).sum(0).sum(),
    "merged with both": lambda x: x.transpose(0, 1).reshape(-1).sum(),
    "merged with the dim before": lambda x: x.transpose(0, 1).reshape(4 * len(x), 3).sum(1).sum(),
    "merged and parted": lambda x: (
        (x.transpose(0, 1).reshape(4 * len(x), 3) @ torch.ones(3, 3)).view(4, len(x), 3).sum()
    ),
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


def for_two(joint: JointGraph) -> list[Operation]:
    """The operations of a graph for one sample as for two, with the samples that the rules follow."""
    samples: dict[Value, Samples] = {}
    longer = inputs_for_two(joint, {INPUT: 0})
    found = []
    for _, operation in operations_for_two(joint, longer, {*joint.module.graph.nodes}, samples):
        found.append(operation)
        if operation.call is not None:
            given = [samples.get(operand) for operand in operation.operands]
            placed = samples_of_results(operation, operation.call, given) or []
            samples |= {
                v: s for v, s in zip(operation.results, placed, strict=False) if v is not None and s is not None
            }
        elif operation.port == INPUT:
            samples[operation.values[0]] = Shard(0, 2)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_has_the_shapes_of_a_trace_for_two(name: str) -> None:
    found, expected = for_two(forward_of(PROGRAMS[name], 1)), operations(forward_of(PROGRAMS[name], 2))
    # What one sample has in a row is copied for two.
    expected = [each for each in expected if each.node.target is not torch.ops.aten.clone.default]
    assert [shapes(each) for each in found] == [shapes(each) for each in expected]


def shapes(operation: Operation) -> list[torch.Size]:
    return [result.tensor.shape for result in operation.results if result is not None]


def test_an_op_that_takes_no_other_sizes_raises() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros(1, 4, 3)], 1).sum()

    with pytest.raises(OneSampleError, match="cat"):
        for_two(forward_of(run, 1))
