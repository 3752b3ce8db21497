"""What a model may be that was expected to be another: distributed or not, with or without values."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors.base import FxparError, some_of


class AlreadyDistributedError(FxparError):
    """`distribute` was called twice on one model, or on two that share modules.

    Args:
        part: the path of the first module that is distributed already; of the model itself, it is empty.
    """

    def __init__(self, model: str, part: str) -> None:
        what = f"module {part!r} of {model}" if part else model
        super().__init__(
            f"{what} is distributed already; build a fresh model to distribute it differently. Models that share "
            "modules become one, whose forward is told by an argument which loss to compute"
        )


class AmbiguousTargetError(FxparError):
    """`add_loss` would give a forward an argument that it has."""

    def __init__(self, model: str, target: str, signature: str) -> None:
        super().__init__(
            f"add_loss gives the forward of {model} the argument {target!r}, but expected one without it; found "
            f"forward{signature}; compute the loss in the forward, or rename its argument"
        )


class TrainedLossError(FxparError):
    """The loss given to `add_loss` has parameters of its own."""

    def __init__(self, loss: str, names: Sequence[str]) -> None:
        super().__init__(
            f"add_loss expected a loss without parameters, but {loss} has {some_of(names)}, which the model would "
            "lack; make it a submodule of the model, and compute the loss in its forward"
        )


class UninitializedModuleError(FxparError):
    """A module built on the meta device has buffers that neither it nor a checkpoint can give values."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        super().__init__(
            f"module {path!r} was built on the meta device with the buffers {', '.join(names)}, which no checkpoint "
            "has (persistent=False), and nothing computed them; pass init_weights=<callable taking a module> that does "
            "to distribute (models of transformers have model._init_weights), or build this module on a real device"
        )


class NotLoadedError(FxparError):
    """A model built on the meta device runs before all its tensors have values."""

    def __init__(self, names: Sequence[str], shown: int = 10) -> None:
        super().__init__(
            f"the model was built on the meta device, and has no values yet for {some_of(names, shown)}; call "
            "load_state_dict or fxpar.load_pretrained before the first step, or pass init_weights=<callable taking a "
            "module> to distribute"
        )


class PlainModelError(FxparError):
    """A function for distributed models was given another one."""

    def __init__(self, call: str, model: str) -> None:
        super().__init__(
            f"{call} expected a model that fxpar.distribute has distributed, but this {model} is not: call "
            "fxpar.distribute(model, mesh, ...) first, and pass what it returns, or torch.compile of that"
        )


class OneProcessMethodError(FxparError):
    """A method of the model that needs all of its parameters was called on a distributed model."""

    def __init__(self, model: str, method: str, remedy: str) -> None:
        super().__init__(
            f"{model}.{method} expected all parameters in this process, but the model is distributed: each rank holds "
            f"shards of its own stages alone; {remedy}"
        )


class CompiledTooEarlyError(FxparError):
    """A model was compiled before it was distributed, and so not as what it has become."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} was given to torch.compile before fxpar.distribute, which changes how it is called: expected "
            'fxpar.distribute(model, ...) first; call torch.compile(model, backend="fxpar") after it'
        )


class ReplacedForwardError(FxparError):
    """The forward of a distributed model was replaced by one that does not call it."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the forward of {model} was set after fxpar.distribute, to a function that does not return what the one "
            "before it returned: set `model.forward` before fxpar.distribute, which traces it"
        )


class ReplacedParameterError(FxparError):
    """A parameter of a distributed model was taken away, or something else was put in its place."""

    def __init__(self, what: str, expected: str, found: str) -> None:
        super().__init__(
            f"{what}: expected {expected}, as a step is planned for it, found {found}; change its values in place, by "
            "copy_ or load_state_dict, or change the model before fxpar.distribute"
        )


class ConvertedModelError(FxparError):
    """Parameters of a distributed model would be moved to another device, or converted to another type."""

    def __init__(self, model: str, before: str, after: str) -> None:
        super().__init__(
            f"{model} is distributed with parameters of {before}, for which its step is planned: expected that they "
            f"stay so, found a call that makes them {after}; convert the model before fxpar.distribute, or keep its "
            "weights and compute in another type by distribute(..., precision=fxpar.Precision(compute=torch.bfloat16))"
        )
