"""The ops that mark a traced program: where a parameter is read, a batch enters, a result leaves, a layout is hinted.

Their fakes return the *logical* shapes of one microbatch, so that tracing sees the single-device program. They would
run only in a graph that another backend compiled.
Every marker carries `model`, the handle of the distributed model it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import InvalidHintError, WrongBackendError
from fxpar.ir.layout import AXES

PLAIN = -1
"""Value of `batch_dim` for an argument that all microbatches share."""


@torch.library.custom_op("fxpar::param", mutates_args=())
def param(stand_in: Tensor, shape: list[int], dtype: torch.dtype, device: str, fqn: str, model: int) -> Tensor:
    """The parameter `fqn` in its logical `shape`; it requires gradients if `stand_in` does."""
    raise WrongBackendError


@param.register_fake
def _param_fake(stand_in: Tensor, shape: list[int], dtype: torch.dtype, device: str, fqn: str, model: int) -> Tensor:
    return stand_in.new_empty(shape, dtype=dtype, device=device)


@torch.library.custom_op("fxpar::enter", mutates_args=())
def enter(x: Tensor, microbatches: int, batch_dim: int, position: int, model: int) -> Tensor:
    """One microbatch of the forward's tensor argument number `position`, which holds this batch shard's rows."""
    raise WrongBackendError


@enter.register_fake
def _enter_fake(x: Tensor, microbatches: int, batch_dim: int, position: int, model: int) -> Tensor:
    shape = list(x.shape)
    if batch_dim != PLAIN:
        shape[batch_dim] //= microbatches
    return x.new_empty(shape)


@torch.library.custom_op("fxpar::exit", mutates_args=())
def exit(x: Tensor, is_named_loss: bool, model: int) -> Tensor:
    """A result of the forward, as one microbatch computes it, and whether the forward calls it "loss"."""
    raise WrongBackendError


@torch.library.custom_op("fxpar::shard", mutates_args=())
def shard_marker(x: Tensor, hint: str) -> Tensor:
    """The identity, with a hint (JSON of one entry per dim) for the layout of `x` and of its gradient."""
    return x.clone()


@torch.library.custom_op("fxpar::border", mutates_args=())
def border(x: Tensor) -> Tensor:
    """The identity, where a value leaves a stage; it hides views from autograd, so that outputs share no memory."""
    return x.clone()


@torch.library.custom_op("fxpar::batch_mean", mutates_args=())
def batch_mean(x: Tensor) -> Tensor:
    """The mean of `x` over all batch shards; for one shard, as in the traced program, `x`."""
    return x.clone()


def _identity_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _shard_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.fxpar.shard(gradient, ctx.hint), None


def _save_hint(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.hint = inputs[1]


def _not_compiled_by_fxpar(ctx: Any, gradient: Tensor) -> Any:
    """fxpar takes gradients with respect to the marker's output; another backend would differentiate the marker."""
    raise WrongBackendError


exit.register_fake(_identity_fake)
batch_mean.register_fake(_identity_fake)
shard_marker.register_fake(_identity_fake)
border.register_fake(_identity_fake)
exit.register_autograd(lambda ctx, gradient: (gradient, None, None))
border.register_autograd(lambda ctx, gradient: gradient)
# The mean on each shard depends on the values of all shards: the gradient is the mean of all shards' gradients.
batch_mean.register_autograd(lambda ctx, gradient: torch.ops.fxpar.batch_mean(gradient))
shard_marker.register_autograd(_shard_backward, setup_context=_save_hint)
param.register_autograd(_not_compiled_by_fxpar)
enter.register_autograd(_not_compiled_by_fxpar)


def shard(x: Tensor, spec: Sequence[str | None]) -> Tensor:
    """Hint the layout of an activation inside a forward: the mesh axis (or None) of each dim of `x`.

    Returns `x`, unchanged. Under `torch.compile(backend="fxpar")` the value and its gradient get this layout.

    Raises:
        InvalidHintError: the hint does not have one entry per dim, names an unknown axis, or names an axis twice.
    """
    check_spec("fxpar.shard", spec, x.dim())
    # JSON written by hand: Dynamo cannot trace through json.dumps.
    entries = ", ".join("null" if axis is None else f'"{axis}"' for axis in spec)
    hinted: Tensor = torch.ops.fxpar.shard(x, f"[{entries}]")
    return hinted


def check_spec(where: str, spec: Sequence[Any], num_dims: int) -> None:
    """Check a hint of plain axis names; grouped entries count by their axis.

    Raises:
        InvalidHintError: as `shard`.
    """
    if len(spec) != num_dims:
        raise InvalidHintError(where, tuple(spec), f"it has {len(spec)} entries, the tensor has {num_dims} dims")
    axes = [getattr(entry, "axis", entry) for entry in spec if entry is not None]
    automatic = [axis for axis in AXES if axis in ("x", "y")]
    for axis in axes:
        if axis not in automatic:
            raise InvalidHintError(
                where, tuple(spec), f"axis {axis!r} is none of {automatic}, the axes that hints may use"
            )
        if axes.count(axis) > 1:
            raise InvalidHintError(
                where, tuple(spec), f"axis {axis!r} is used {axes.count(axis)} times; once is allowed"
            )


def is_marker(node: fx.Node, name: str) -> bool:
    """Whether `node` calls the marker op `fxpar::name`."""
    return node.op == "call_function" and node.target in (
        getattr(torch.ops.fxpar, name),
        getattr(torch.ops.fxpar, name).default,
    )
