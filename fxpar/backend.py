"""The `torch.compile` backend: the entry point of the group `torch_dynamo_backends`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.random import fork_rng

from fxpar._torch.compiler import compile_single_device
from fxpar.build_differentiable import build_evaluation, build_training
from fxpar.config import Options, read_options
from fxpar.environment import is_first_rank
from fxpar.errors import FxparError, ModeError, NotDistributedError
from fxpar.garbage_collection import garbage_collection_paused
from fxpar.ir.capture import Capture, belongs_to_distributed_model, read_capture
from fxpar.ir.trace_forward import raising
from fxpar.model.distribution import has_distributed_model
from fxpar.passes.kept_constants import kept_constants
from fxpar.runtime.unavailable import with_kept
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import mesh_of_this_world


def fxpar(
    module: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile what Dynamo captured: a distributed model's whole step, or any other graph for one device.

    Args:
        module: Dynamo's graph.
        example_inputs: fake tensors for its arguments.
        options: see `fxpar.config.Options`.
        mode: refused, rather than ignored.
    """
    try:
        if mode is not None:
            raise ModeError(mode)
        return _compile(module, example_inputs, read_options(options))
    except FxparError as error:
        return raising(error)


def _compile(module: fx.GraphModule, example_inputs: Sequence[Tensor], options: Options) -> Callable[..., Any]:
    if not belongs_to_distributed_model(module):
        _check_not_forgotten(example_inputs)
        return compile_single_device(module, example_inputs, options.lowering)
    return _build(read_capture(module), options)


class CapturedSteps:
    """The steps of a forward that was captured, for the options of `torch.compile`: for training and for evaluation.

    Each is built when it is first called; it raises, if that fails.
    """

    def __init__(self, capture: Capture, options: Mapping[str, Any]) -> None:
        self._capture = capture
        self._options = options
        self._built: dict[bool, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Run a step, forward and backward where grad is enabled, otherwise the forward alone."""
        with_grad = torch.is_grad_enabled()
        if with_grad not in self._built:
            self._built[with_grad] = self._build()
        return self._built[with_grad](*args)

    def _build(self) -> Callable[..., Any]:
        try:
            with fork_rng(_devices()):  # it may run made-up values, which must not change what the user draws
                return _build(self._capture, read_options(self._options))
        except FxparError as error:
            return raising(error)


def _devices() -> list[int]:
    """This rank's GPU, if it uses one: that of others has random numbers of its own."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def _build(capture: Capture, options: Options) -> Callable[..., Any]:
    with garbage_collection_paused(), naming_lost_peers("what ranks tell each other while they compile a step"):
        build = build_training if torch.is_grad_enabled() else build_evaluation
        step = build(capture, options)
        return with_kept(step, capture.kept, kept_constants(capture))


def _check_not_forgotten(example_inputs: Sequence[Tensor]) -> None:
    """Detect a model that every rank would train on its own, although a mesh was made: `distribute` was forgotten.

    That is certain if the mesh divides models (it has more than the axis `data`) and none was distributed: an error.
    Otherwise it may be a second model, or one that the user runs under DistributedDataParallel: a warning.

    Raises:
        NotDistributedError: `distribute` was certainly forgotten.
    """
    mesh = mesh_of_this_world()
    trains = torch.is_grad_enabled() and any(given.requires_grad and given.is_leaf for given in example_inputs)
    if mesh is None or mesh.num_ranks == 1 or not trains:
        return
    error = NotDistributedError(str(mesh))
    if mesh.num_ranks > mesh.data and not has_distributed_model(mesh):
        raise error
    if is_first_rank():
        warnings.warn(str(error), stacklevel=2)
