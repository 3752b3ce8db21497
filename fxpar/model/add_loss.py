"""Let a model that returns predictions return its loss, where a training script computes it outside of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fxpar.errors import AmbiguousTargetError, TrainedLossError
from fxpar.model.logical import refuse_distributed

TARGET = "target"
"""The argument that `add_loss` gives a forward."""


def add_loss(model: nn.Module, loss: Callable[[Any, Any], Any]) -> nn.Module:
    """Let the forward of `model` take the argument `target`, and then return `loss(output, target)`; return the model.

    Without a target, the forward returns its output as before, for evaluation. So a step runs the forward once, and not
    twice, as where a script computes the loss. The model keeps its type, its parameters and their names, and trains on
    one process, too:

        model = fxpar.add_loss(model, torch.nn.functional.cross_entropy)
        loss = model(images, target=labels)

    Args:
        model: changed in place, before it is distributed.
        loss: takes the output and the target, which may be any pytree of tensors. What it returns, the forward returns:
            that may be several results, such as `{"loss": loss, "logits": logits}`. In a step it sees one microbatch:
            the loss of the step is the mean over these.

    Raises:
        AlreadyDistributedError: the model was distributed before.
        AmbiguousTargetError: the forward has an argument `target`, or was given a loss before.
        TrainedLossError: the loss is a module with parameters.
    """
    cls = type(model)
    refuse_distributed(model)
    signature = inspect.signature(cls.forward)
    if TARGET in signature.parameters:
        raise AmbiguousTargetError(cls.__name__, TARGET, str(signature))
    if isinstance(loss, nn.Module) and (trained := [name for name, _ in loss.named_parameters()]):
        raise TrainedLossError(type(loss).__name__, trained)
    forward = _forward_with_loss(cls.forward, loss)
    forward.__signature__ = _with_target(signature)  # type: ignore[attr-defined]
    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return model


def _forward_with_loss(plain: Callable[..., Any], loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        return output if target is None else loss(output, target)

    return forward


def _with_target(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    takes_any = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    target = inspect.Parameter(TARGET, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters.insert(len(parameters) - takes_any, target)
    return signature.replace(parameters=parameters)
