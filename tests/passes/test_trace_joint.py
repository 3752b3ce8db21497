"""trace_joint: the joint graph computes the stage's values and the gradients that autograd computes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType

from fxpar.errors import UnsupportedGraphError
from fxpar.ir import node_meta
from fxpar.ir.capture import example
from fxpar.ir.stage import JointGraph, PortKind, StageGraph
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from tests.support.captures import captured


class Normed(nn.Module):
    """A buffer that the forward changes, an edge that is a view, and one that is passed through unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(3, 3)
        self.third = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).view(-1, 2, 3)
        left, right = h[:, 0], h[:, 1]
        left = torch.relu(self.second(left))
        return (self.third(left) * right).sum()


def stages_of(model: nn.Module, boundaries: Sequence[str], *args: Tensor) -> tuple[StageGraph, ...]:
    capture, _ = captured(model, args)
    return split_stages(capture, boundaries)


def leaves(stage: StageGraph) -> list[Tensor]:
    """Random tensors like the stage's inputs, as Dynamo saw them."""
    placeholders = [node for node in stage.module.graph.nodes if node.op == "placeholder"]
    values = [example(node) for node in placeholders]
    return [
        torch.randn(value.shape).requires_grad_(value.requires_grad)
        if value.is_floating_point()
        else torch.zeros(value.shape, dtype=value.dtype)
        for value in values
    ]


def check(stage: StageGraph, joint: JointGraph) -> None:
    """Compare the joint graph with running the stage and differentiating it."""
    inputs = leaves(stage)
    given = [value.detach().clone() for value in inputs]
    outputs = stage.module(*inputs)
    tangents = {port: torch.randn_like(out) for port, out in zip(stage.outputs, outputs, strict=True)}
    wanted = [(tangents[port], out) for port, out in zip(stage.outputs, outputs, strict=True) if out.requires_grad]
    differentiable = [value for value in inputs if value.requires_grad]
    expected = torch.autograd.grad([out for _, out in wanted], differentiable, [tangent for tangent, _ in wanted])
    found = joint.module(*given, *(tangents[port] for port in joint.tangents))
    num_outputs = len(joint.outputs)
    torch.testing.assert_close(list(found[: len(outputs)]), [out.detach() for out in outputs])
    torch.testing.assert_close(list(found[num_outputs:]), list(expected))
    for port, value in zip(joint.outputs[len(outputs) :], found[len(outputs) : num_outputs], strict=True):
        torch.testing.assert_close(value, inputs[stage.inputs.index(port)])


@pytest.mark.parametrize("boundaries", [[], ["second"], ["second", "third"]])
def test_joint_graph_computes_values_gradients_and_buffers(boundaries: list[str]) -> None:
    torch.manual_seed(0)
    for stage in stages_of(Normed(), boundaries, torch.randn(4, 6)):
        check(stage, trace_joint(stage, with_backward=True))


def test_mutated_buffers_are_outputs_after_those_of_the_stage() -> None:
    (stage,) = stages_of(Normed(), [], torch.randn(4, 6))
    joint = trace_joint(stage, with_backward=True)
    kinds = [port.kind for port in joint.outputs]
    assert kinds == [PortKind.RESULT] + [PortKind.BUFFER] * 3  # running mean, running variance, batches tracked


def test_forward_alone_has_no_tangents_and_no_gradients() -> None:
    (stage,) = stages_of(Normed(), [], torch.randn(4, 6))
    joint = trace_joint(stage, with_backward=False)
    assert joint.tangents == joint.gradients == ()
    assert {port.kind for port in joint.outputs} == {PortKind.RESULT, PortKind.BUFFER}


def test_nodes_know_their_module_and_their_direction() -> None:
    (stage,) = stages_of(Normed(), [], torch.randn(4, 6))
    joint = trace_joint(stage, with_backward=True)
    computed = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    assert {node.meta["partitioner_tag"] for node in computed} == {"is_forward", "is_backward"}
    assert not [node for node in computed if node.target is torch.ops.fxpar.border.default]


class Checked(nn.Module):
    """What is there for its effect alone: assertions, on inputs and on what is computed, and those of `one_hot`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, classes: Tensor, weights: Tensor) -> Tensor:
        torch._assert_async((weights > 0).all(), "weights must be positive")
        h = torch.relu(self.first(nn.functional.one_hot(classes, 5).float()))
        torch._assert_async((h < 1e6).all(), "hidden values must be small")
        return (self.second(h) * weights).sum()


ASSERTION = torch.ops.aten._assert_async.msg


def test_ops_without_a_result_have_the_value_none_and_run() -> None:
    (stage,) = stages_of(Checked(), [], torch.zeros(4, dtype=torch.long), torch.ones(4, 5))
    joint = trace_joint(stage, with_backward=True)
    assertions = [node for node in joint.module.graph.nodes if node.target is ASSERTION]
    assert len(assertions) == 4 and all(node_meta.value(node) is None for node in assertions)
    values = {"0": torch.arange(4), "1": torch.full((4, 5), -1.0)} | dict(Checked().named_parameters())
    with pytest.raises(RuntimeError, match="weights must be positive"):
        joint.module(*(values[port.name] for port in joint.inputs), torch.ones(()))


def test_an_op_whose_effects_torch_orders_is_an_error_that_says_how_to_write_it() -> None:
    with torch.library._scoped_library("fxpar_test", "DEF") as library:
        library.define("report(Tensor x) -> ()")
        library.impl("report", lambda x: None, "CompositeExplicitAutograd")
        torch.library._register_effectful_op("fxpar_test::report", _EffectType.ORDERED)

        class Reporting(Checked):
            def forward(self, classes: Tensor, weights: Tensor) -> Tensor:
                torch.ops.fxpar_test.report(weights)
                return super().forward(classes, weights)

        (stage,) = stages_of(Reporting(), [], torch.zeros(4, dtype=torch.long), torch.ones(4, 5))
        with pytest.raises(UnsupportedGraphError, match=r"stage 0 calls fxpar_test.report.*Tensor\(a!\)"):
            trace_joint(stage, with_backward=True)


class Numbered(nn.Sequential):
    """Layers without names; the sum of what the last one returns is the loss."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.sum()


@pytest.mark.parametrize("repeats", [1, 6])
def test_names_of_parameters_may_be_numbers(repeats: int) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(repeats) for layer in (nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU())]
    (stage,) = stages_of(Numbered(*layers), [], torch.randn(4, 6))
    check(stage, trace_joint(stage, with_backward=True))


class Clamped(nn.Module):
    """A weight that the forward clamps before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-0.1, 0.1)
        return self.first(x).sum()


def test_a_parameter_that_the_forward_changes_is_refused() -> None:
    (stage,) = stages_of(Clamped(), [], torch.randn(4, 6))
    with pytest.raises(UnsupportedGraphError, match=r"changes parameter:first.weight in place.* between steps"):
        trace_joint(stage, with_backward=True)
