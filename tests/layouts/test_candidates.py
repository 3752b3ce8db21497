"""Which strategies the fixpoint of the rules finds, and which it leaves out."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from fxpar.costs.dataflow import Border, Operation, Value, operations
from fxpar.ir.layout import REPLICATE, Layout, Partial, Shard
from fxpar.ir.stage import PortKind
from fxpar.layouts.candidates import Candidates
from fxpar.layouts.pins import Pin
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.rules.rule import Strategy
from tests.layouts.laid_out import decomposed


class Fused(nn.Module):
    """Three projections in one weight, and heads that only the last op shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.weight.t()).split(8, dim=-1)
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(0, 1) for part in (q, k, v))
        return torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v


def found(
    program: list[Operation], pins: dict[fx.Node, Pin] | None = None, parts: int = 2, solved: SolvedAxes | None = None
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies over x by the name of the op or port."""
    strategies = Candidates(program, "x", parts, pins or {}, set(), solved or SolvedAxes()).find()
    names = [str(op.port) if op.port else op.node.name for op in program]
    return dict(zip(names, strategies, strict=True))


def fused() -> list[Operation]:
    return operations(decomposed(Fused(), torch.randn(6, 8), with_backward=False))


def test_a_shard_by_heads_is_followed_back_into_the_fused_weight() -> None:
    strategies = found(fused())["parameter:weight"]
    assert Strategy((), (Shard(0, 2, 3),)) in strategies, "each of q, k and v by heads"
    assert Strategy((), (Shard(0, 2),)) in strategies, "as it is written"


def test_a_pin_keeps_one_dim_and_leaves_its_digit_open() -> None:
    program = fused()
    (weight,) = (op.node for op in program if str(op.port) == "parameter:weight")
    placements = [s.outputs[0] for s in found(program, {weight: Pin({"x": (0, None)})})["parameter:weight"]]
    assert {Shard(0, 2), Shard(0, 2, 3)} <= set(placements)
    assert all(isinstance(p, Shard) and p.dim == 0 for p in placements)
    assert found(program, {weight: Pin({"x": (0, 3)})})["parameter:weight"] == (Strategy((), (Shard(0, 2, 3),)),)
    assert found(program, {weight: Pin()})["parameter:weight"] == (Strategy((), (REPLICATE,)),)


def test_a_pin_of_a_dim_with_too_few_elements_leaves_no_strategy() -> None:
    program = fused()
    (weight,) = (op.node for op in program if str(op.port) == "parameter:weight")
    assert found(program, {weight: Pin({"x": (1, None)})}, parts=16)["parameter:weight"] == ()


def test_inputs_are_replicated_and_results_are_never_partial() -> None:
    program = fused()
    strategies = found(program)
    (port,) = (str(op.port) for op in program if op.port and op.port.kind is PortKind.INPUT)
    assert strategies[port] == (Strategy((), (REPLICATE,)),)
    assert len(strategies["result:0"]) > 1
    assert not any(isinstance(s.inputs[0], Partial) for s in strategies["result:0"])


def test_a_gradient_has_the_candidates_of_its_parameter_and_may_be_partial() -> None:
    program = operations(decomposed(nn.Linear(8, 8, bias=False), torch.randn(6, 8)))
    strategies = Candidates(program, "x", 2, {}, set(), SolvedAxes()).find()
    placements = {
        op.border: {p for strategy in found for p in (*strategy.inputs, *strategy.outputs)}
        for op, found in zip(program, strategies, strict=True)
        if op.is_parameter(Border.INPUT) or op.is_parameter(Border.GRADIENT)
    }
    assert placements[Border.GRADIENT] == placements[Border.INPUT] | {Partial()}
    assert {REPLICATE, Shard(0, 2), Shard(1, 2)} <= placements[Border.INPUT]


def test_an_axis_takes_what_another_has_left() -> None:
    program = operations(decomposed(nn.ReLU(), torch.randn(8), with_backward=False))
    relu = next(op for op in program if op.call is not None)
    (operand,), number = relu.operands, program.index(relu)
    by_y = Layout((8,), (("y", Shard(0, 2)),))
    solved = SolvedAxes({Value(relu.node): by_y}, {(number, 0): by_y})
    assert operand.tensor.shape == (8,)
    strategies = found(program, solved=solved)[relu.node.name]
    assert Strategy((Shard(0, 2, 2),), (Shard(0, 2, 2),)) in strategies, "inside y's pieces"
    assert Strategy((Shard(0, 2),), (Shard(0, 2),)) not in strategies, "that digit is y's"
