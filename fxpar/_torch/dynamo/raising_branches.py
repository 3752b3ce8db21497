"""Branches on the values of tensors that only raise are traced as assertions, as those of `assert` are.

Before: `if (x < 0).any(): raise ValueError(...)`, where Dynamo would end the graph
After:  `torch._assert_async(~(x < 0).any(), ...)`
"""

import dis
import functools
from typing import Any

from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpar._torch.compiler import assert_async, traces_wider
from fxpar._torch.dynamo.jumps import Jump, change_jumps, truth_of_tensor

_JUMPS = {*dis.hasjrel, *dis.hasjabs}


@functools.cache
def assert_what_branches_raise() -> None:
    """Let Dynamo trace such branches, where it also traces numbers that are read from tensors."""
    change_jumps(_asserting)


def _asserting(jump: Jump, jumps_if: bool) -> Jump:
    """An instruction that jumps, but asserts that neither branch is taken that only raises."""

    def run(self: Any, inst: Instruction) -> None:
        if isinstance(self.stack[-1], SymNodeVariable):
            return _jump_by_number(jump, self, inst)
        condition = truth_of_tensor(self.stack[-1])
        if condition is None or not traces_wider():
            return jump(self, inst)
        next_raises = _only_raises(self, self.instruction_pointer)
        line = next_raises or _only_raises(self, self.indexof[inst.target])
        if line is None:
            return jump(self, inst)
        self.pop()
        must_jump = next_raises is not None
        asserted = condition if must_jump is jumps_if else condition.call_method(self, "logical_not", [], {})
        message = f"the forward raises at {line}, for values of tensors"
        self.output.create_proxy("call_function", assert_async, (asserted.as_proxy(), message), {})
        if must_jump:
            self.jump(inst)
        return None

    return run


def _jump_by_number(jump: Jump, self: Any, inst: Instruction) -> None:
    """Break the graph where a number from a tensor decides: Dynamo does so for comparisons, but not for the number."""
    try:
        jump(self, inst)
    except GuardOnDataDependentSymNode as error:
        unimplemented(gb_type="Data-dependent branching", context=str(error), explanation=str(error), hints=[])


def _only_raises(self: Any, start: int) -> str | None:
    """The line of the `raise` that the instructions from `start` lead to, without a jump or a handler on the way."""
    for inst in self.instructions[start:]:
        if inst.opcode in _JUMPS or inst.exn_tab_entry is not None or inst.opname.startswith("RETURN"):
            return None
        if inst.opname == "RAISE_VARARGS":
            line = inst.positions.lineno if inst.positions else "an unknown line"
            return f"{self.f_code.co_filename}:{line}"
    return None
