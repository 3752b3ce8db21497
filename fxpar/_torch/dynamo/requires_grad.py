"""Dynamo traces forwards that set `requires_grad` of a value, as some do before they checkpoint what follows."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin
from torch._dynamo.variables.base import VariableTracker

# Since release 2.13; before, such forwards are graph breaks.
SetAttribute: Any = vars(builtin).get("SetAttrBuiltinVariable")


@cache
def let_values_require_grad() -> None:
    """Let Dynamo trace `value.requires_grad = True` where the forward has computed the value.

    Parameters have the same gradients without it: it adds that of the value, which nobody can ask for after the
    forward. So no operation is traced; what asks for the flag is told that it is set, as are gradients that the forward
    itself takes.
    """
    if SetAttribute is None:
        return
    trace = SetAttribute.call_function

    def call_function(
        self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if len(args) == 3 and not kwargs and _sets_requires_grad(*args):
            computed: Any = args[0].realize()
            computed.requires_grad = True
            example = computed.as_proxy().node.meta["example_value"]
            example.requires_grad_(example.is_leaf or example.requires_grad)
            return ConstantVariable.create(None)
        traced: VariableTracker = trace(self, tx, args, kwargs)
        return traced

    SetAttribute.call_function = call_function


@cache
def let_results_depend_on_leaves() -> None:
    """Let Dynamo trace forwards of distributed models that call `requires_grad_()` of what their results depend on.

    AOTAutograd drops that call. It matters to gradients that the forward itself takes, which `fxpar.ir` writes out
    before. Graphs of other models are checked as ever.
    """
    check = vars(OutputGraph).get("_check_requires_grad_intermediate_outputs")
    if check is None:  # since release 2.13; before, such forwards are graph breaks
        return

    def checked(self: OutputGraph, *args: Any) -> None:
        if not any(str(node.target).startswith("fxpar.") for node in self.graph.nodes):
            check(self, *args)

    patched: Any = OutputGraph
    patched._check_requires_grad_intermediate_outputs = checked


def _sets_requires_grad(target: VariableTracker, name: VariableTracker, value: VariableTracker) -> bool:
    """Whether this is `target.requires_grad = True`, of a tensor that was computed."""
    names_it = name.is_python_constant() and name.as_python_constant() == "requires_grad"
    sets_it = value.is_python_constant() and value.as_python_constant() is True
    return names_it and sets_it and _is_computed(target.realize())


def _is_computed(variable: VariableTracker) -> bool:
    """Whether it is no parameter, of which fxpar's marker tells what it requires."""
    if type(variable) is not TensorVariable or variable.source is not None:
        return False
    return not str(variable.as_proxy().node.target).startswith("fxpar.param")
