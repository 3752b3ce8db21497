"""What Dynamo does at the instructions that jump where a condition holds, or where it does not."""

import dis
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import LazyVariableTracker, TensorVariable
from torch._dynamo.variables.base import VariableTracker

Jump = Callable[[Any, Instruction], None]
"""Traces an instruction in a translator, which has the condition on its stack."""

_JUMPS_IF: dict[str, bool] = {
    name: "IF_TRUE" in name
    for name in dis.opmap
    if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))
}
"""Instructions that take a condition from the stack, and whether they jump where it holds."""


def change_jumps(change: Callable[[Jump, bool], Jump]) -> None:
    """Let Dynamo trace such an instruction as `change` tells, of how it did and whether it jumps where it holds."""
    translators: list[Any] = [InstructionTranslatorBase, *_subclasses(InstructionTranslatorBase)]
    for table in (translator.dispatch_table for translator in translators):
        for name, jumps_if in _JUMPS_IF.items():
            opcode = dis.opmap[name]
            if table[opcode] is not None:
                table[opcode] = change(table[opcode], jumps_if)


def _subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [each for child in children for each in (child, *_subclasses(child))]


def truth_of_tensor(condition: VariableTracker) -> VariableTracker | None:
    """A condition that is a tensor of one element; None for any other, which is left as lazy as it is."""
    if isinstance(condition, LazyVariableTracker):
        if not condition.is_realized() and not isinstance(condition.peek_value(), torch.Tensor):
            return None
        condition = condition.realize()
    if not isinstance(condition, TensorVariable):
        return None
    return condition if condition.as_proxy().node.meta["example_value"].numel() == 1 else None
