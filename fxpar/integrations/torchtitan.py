"""A model spec for the Trainer of torchtitan: its pipelined models are distributed by fxpar, loss included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from fxpar.distribute_model import distribute
from fxpar.errors import InvalidOptionError
from fxpar.ir.precision import Precision
from fxpar.world.mesh import init_mesh, num_batch_shards

_SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved"}
"""torchtitan's names of schedules, in lower case, and those of fxpar."""


def fxpar_spec(spec: ModelSpec, *, options: Mapping[str, Any] | None = None, **others: Any) -> ModelSpec:
    """The spec of a model that fxpar distributes over the mesh of torchtitan's `parallelism`.

    Args:
        options: those of `torch.compile`.
        others: those of `fxpar.distribute`, over what torchtitan's config says. `example_inputs` are keyword
            arguments: "tokens", "labels", "loss_kwargs", and what the data loader adds (default: "positions").
    """
    functions = {"parallelize_fn": refuse_unpipelined, "pipelining_fn": partial(pipeline, options=options, **others)}
    return replace(spec, **functions)


def refuse_unpipelined(model: nn.Module, **others: Any) -> NoReturn:
    """A `parallelize_fn`: the Trainer calls it where there is no pipeline, and computes the loss after the forward.

    Raises:
        InvalidOptionError: always.
    """
    raise InvalidOptionError(
        "parallelism.pipeline_parallel_degree", 1, "at least 2: otherwise the Trainer computes the loss out of reach"
    )


def pipeline(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    ac_config: Any,
    device: torch.device,
    loss_fn: BaseLoss,
    model_config: BaseModel.Config,
    options: Mapping[str, Any] | None = None,
    compile_config: Any = None,
    dump_folder: str = "",
    parallelize_fn: Any = None,
    **others: Any,
) -> tuple[FxparSchedule, list[nn.Module], bool, bool]:
    """A `pipelining_fn`: distribute the model with its loss, and return what runs its steps.

    Every rank is told that it has the first and the last stage, and so gets the tokens, the labels and the loss.

    Raises:
        InvalidOptionError: the config asks for what fxpar cannot do.
        as `fxpar.distribute`.
    """
    _check(parallel_dims, training, parallelism, loss_fn)
    _check_attention(model_config)
    schedule = _schedule(parallelism)
    mesh = init_mesh(
        pipe=parallel_dims.pp,
        data=parallel_dims.dp_replicate,
        z=parallel_dims.dp_shard,
        x=parallel_dims.tp,
        device_type=device.type,
    )
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    _return_loss(model, loss_fn, parts=microbatches * num_batch_shards(mesh))
    arguments = {
        "microbatches": microbatches,
        "stages": _stages(parallelism.module_fqns_per_model_part),
        "schedule": schedule,
        "precision": _precision(training),
        "example_inputs": _example_inputs(training),
        "init_weights": partial(_initialize, device=device),
        **others,
    }
    distribute(model, mesh, **arguments)
    compiled = torch.compile(model, backend="fxpar", options={"remat": _remat(ac_config), **(options or {})})
    return FxparSchedule(compiled, num_batch_shards(mesh)), [model], True, True


class FxparSchedule:
    """What the Trainer calls in place of a schedule of `torch.distributed.pipelining`; the model runs its own.

    Args:
        model: compiled; its forward returns the sum of the losses of all batch shards.
    """

    def __init__(self, model: Any, num_batch_shards: int) -> None:
        self._model = model
        self._num_batch_shards = num_batch_shards

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor]],
        kwarg_mbs: Sequence[Mapping[str, Any]],
        target_mbs: Sequence[Tensor],
        losses: list[Tensor],
        loss_kwargs: Mapping[str, Any],
        return_outputs: bool = False,
    ) -> None:
        """Run forwards and backwards for the microbatches of a batch, and append the batch's loss to `losses`."""
        loss = self._loss(arg_mbs, kwarg_mbs, target_mbs, loss_kwargs)
        loss.backward()
        losses.append(self._of_shard(loss))

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor]],
        kwarg_mbs: Sequence[Mapping[str, Any]],
        target_mbs: Sequence[Tensor],
        losses: list[Tensor],
    ) -> None:
        """Likewise, forwards alone."""
        with torch.no_grad():
            losses.append(self._of_shard(self._loss(arg_mbs, kwarg_mbs, target_mbs, {})))

    def _loss(
        self,
        arg_mbs: Sequence[tuple[Tensor]],
        kwarg_mbs: Sequence[Mapping[str, Any]],
        target_mbs: Sequence[Tensor],
        loss_kwargs: Mapping[str, Any],
    ) -> Tensor:
        tokens = torch.cat([tokens for (tokens,) in arg_mbs])
        others = {key: torch.cat([given[key] for given in kwarg_mbs]) for key in kwarg_mbs[0]}
        loss: Tensor = self._model(
            tokens=tokens, labels=torch.cat(list(target_mbs)), loss_kwargs=dict(loss_kwargs), **others
        )
        return loss

    def _of_shard(self, loss: Tensor) -> Tensor:
        """A batch shard's part of the sum, since the Trainer adds those of all shards up."""
        return loss.detach() / self._num_batch_shards


def _return_loss(model: nn.Module, loss_fn: BaseLoss, parts: int) -> None:
    """Let the forward return the loss, and nothing initialise the model but `distribute`.

    torchtitan sums losses and gradients over the `parts` of a batch, of which fxpar takes the mean.
    """
    plain = type(model)

    def forward(self: nn.Module, tokens: Tensor, labels: Tensor, loss_kwargs: dict[str, Any], **others: Any) -> Tensor:
        loss: Tensor = loss_fn(plain.forward(self, tokens, **others), labels, **loss_kwargs)[0]
        return parts * loss

    def to_empty(self: nn.Module, **others: Any) -> nn.Module:
        return self

    def init_weights(self: nn.Module, **others: Any) -> None:
        """Nothing: `distribute` has initialised the shards."""

    members = {"forward": forward, "to_empty": to_empty, "init_weights": init_weights, "__module__": plain.__module__}
    model.__class__ = type(plain.__name__, (plain,), members)


def _initialize(module: Module, device: torch.device) -> None:
    """What `init_states` does with each module of a model."""
    module._init_self_parameters()
    module._init_self_buffers(buffer_device=device)


def _check(
    parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig, loss_fn: BaseLoss
) -> None:
    if parallelism.spmd_backend != "partial_dtensor":
        raise InvalidOptionError(
            "parallelism.spmd_backend",
            parallelism.spmd_backend,
            '"partial_dtensor": the others annotate inputs for a mesh of torchtitan\'s own',
        )
    for name, degree in (("context", parallel_dims.cp), ("expert", parallel_dims.ep)):
        if degree > 1:
            raise InvalidOptionError(f"parallelism.{name}_parallel_degree", degree, "1: fxpar has no such axis")
    if training.enable_cpu_offload:
        raise InvalidOptionError("training.enable_cpu_offload", True, "False")
    if isinstance(loss_fn, ChunkedLossWrapper):
        raise InvalidOptionError(
            "loss", "ChunkedLossWrapper", "the loss that it wraps: it takes lm_head out of the model's forward"
        )


def _check_attention(model_config: BaseModel.Config) -> None:
    for kind in (FlexAttention, VarlenAttention):
        for path, *_ in model_config.traverse(kind.Config):
            raise InvalidOptionError(path, kind.__name__, "ScaledDotProductAttention.Config()")


def _stages(parts: Sequence[Sequence[str]] | None) -> list[str] | None:
    """The modules that start the second and later stages."""
    return None if parts is None else [part[0] for part in parts[1:]]


def _schedule(parallelism: ParallelismConfig) -> str:
    if parallelism.pipeline_parallel_schedule_csv:
        return str(parallelism.pipeline_parallel_schedule_csv)
    name: str = parallelism.pipeline_parallel_schedule
    if name.lower() not in _SCHEDULES:
        raise InvalidOptionError(
            "parallelism.pipeline_parallel_schedule",
            name,
            "GPipe, 1F1B or Interleaved1F1B; give fxpar_spec a schedule instead",
        )
    return _SCHEDULES[name.lower()]


def _precision(training: TrainingConfig) -> Precision | None:
    stored, compute, reduce = (
        TORCH_DTYPE_MAP[name]
        for name in (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
    )
    return None if stored == compute == reduce else Precision(compute, reduce)


def _example_inputs(training: TrainingConfig) -> dict[str, Any]:
    shape = training.local_batch_size, training.seq_len
    rows = {name: torch.zeros(shape, dtype=torch.long, device="meta") for name in ("tokens", "labels", "positions")}
    return {**rows, "loss_kwargs": {"global_valid_tokens": torch.zeros((), dtype=torch.long, device="meta")}}


def _remat(ac_config: Any) -> str:
    """The policy of recomputation that stands for torchtitan's: which ops it recomputes, fxpar chooses itself."""
    if ac_config is None:
        return "none"
    return "full" if isinstance(ac_config, FullAC.Config) else "min_cut"
