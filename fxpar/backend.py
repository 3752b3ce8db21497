"""The `torch.compile` backend: the entry point of the group `torch_dynamo_backends`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch import compile_single_device
from fxpar.build_step import build_step
from fxpar.capture import belongs_to_distributed_model, read_capture
from fxpar.config import Options, read_options
from fxpar.errors import FxparError


def fxpar(
    module: fx.GraphModule, example_inputs: Sequence[Tensor], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile what Dynamo captured: a distributed model's whole step, or any other graph for one device.

    Args:
        module: Dynamo's graph.
        example_inputs: fake tensors like its arguments.
        options: see `fxpar.config.Options`.
    """
    try:
        return _compile(module, example_inputs, read_options(options))
    except FxparError as error:
        return _raising(error)


def _compile(module: fx.GraphModule, example_inputs: Sequence[Tensor], options: Options) -> Callable[..., Any]:
    if not belongs_to_distributed_model(module):
        return compile_single_device(module, example_inputs, options.lowering)
    return build_step(read_capture(module), options, with_backward=torch.is_grad_enabled())


def _raising(error: FxparError) -> Callable[..., Any]:
    """A callable that raises `error`; raised from here, Dynamo would wrap it in an error of its own class."""

    def fail(*args: Any) -> Any:
        raise error

    return fail
