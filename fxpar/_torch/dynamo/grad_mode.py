"""Note where a trace asks for the grad mode, of which Dynamo's guards do not tell."""

import functools
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable

_READS = "_fxpar_reads_of_grad_mode"

_GET_ATTRIBUTE = "tp_getattro_impl" if hasattr(TensorVariable, "tp_getattro_impl") else "var_getattr"
"""Of a `TensorVariable`, the method that reads an attribute: `tp_getattro_impl` since torch 2.14."""


@functools.cache
def note_reads_of_grad_mode() -> None:
    """Let Dynamo note where the code that it traces asks for what grad mode decides; see `reads_of_grad_mode`."""
    call, read = TorchInGraphFunctionVariable.call_function, getattr(TensorVariable, _GET_ATTRIBUTE)

    def note(tx: Any, node: fx.Node | None) -> None:
        vars(tx.output).setdefault(_READS, []).append(node)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.is_grad_enabled:
            note(tx, None)
        return call(self, tx, args, kwargs)

    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        if name in ("requires_grad", "is_leaf", "grad_fn"):
            note(tx, self.as_proxy().node)
        return read(self, tx, name)

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]
    setattr(TensorVariable, _GET_ATTRIBUTE, get_attribute)


def reads_of_grad_mode() -> list[fx.Node | None]:
    """The tensors whose `requires_grad`, `is_leaf` or `grad_fn` is read in a trace; None for a read of the mode itself.

    To be called while Dynamo calls the backend, of traces that began after `note_reads_of_grad_mode`.
    """
    found: list[fx.Node | None] = vars(InstructionTranslator.current_tx().output).get(_READS, [])
    return found
