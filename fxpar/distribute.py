"""`distribute`: turn a model's parameters into local shards, and its forward into a logical program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fxpar.errors import AlreadyDistributedError, InvalidOptionError
from fxpar.ir.hints import Entry
from fxpar.ir.plan import Plan
from fxpar.make_plan import make_plan
from fxpar.model.checkpoint import install_state_dict_hooks
from fxpar.model.distribution import Distribution, whole_parameters
from fxpar.model.logical import install, is_distributed
from fxpar.model.optimizer_state import watch_optimizers
from fxpar.model.parameters import shard_parameters
from fxpar.model.stale_optimizers import refuse_stale_optimizers
from fxpar.model.unset import place_buffers
from fxpar.schedule import GivenSchedule, schedule_text
from fxpar.world.mesh import Mesh


def distribute(
    model: nn.Module,
    mesh: Mesh,
    *,
    stages: Sequence[str] | int | None = None,
    layouts: Mapping[str, Sequence[Entry]] | None = None,
    microbatches: int = 1,
    schedule: GivenSchedule = "eager-1f1b",
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    batch_dims: Mapping[str | int, int | None] | None = None,
    init_weights: Callable[[nn.Module], None] | None = None,
    plan: Plan | None = None,
) -> nn.Module:
    """Spread `model` over `mesh`, in place, and return it.

    Every parameter becomes this rank's piece of a DTensor on its stage's ranks; parameters of other stages leave the
    model. Compile the result with `torch.compile(model, backend="fxpar")`.

    Args:
        model: any module whose forward returns a loss: of its scalar results that require grad, the one under the key
            or in the field "loss", else the first. It may be built under `torch.device("meta")`: then its parameters
            are initialised or loaded piece by piece.
        mesh: from `init_mesh`.
        stages: paths of the modules that open the second and later stages, or a count (default: the pipe axis, twice
            that for an interleaved schedule).
        layouts: hints; pattern over parameter names (or module paths with ":out") -> one entry per dim.
        microbatches: into how many the local batch is split.
        schedule: "gpipe", "1f1b", "eager-1f1b", "eager-1f1b-delayed", "interleaved", "zb-h1" or "zb-h2"; or your own: a
            CSV file as of `torch.distributed.pipelining`, or a list of actions such as "0F0" for each pipe rank.
        example_inputs: the forward's arguments (a tuple, or a dict of keywords; meta tensors do), for
            balancing stages and for finding the storage of weights that have no hint.
        batch_dims: argument name or position -> its batch dim, or None to share it between microbatches. By default
            tensors whose first dim equals that of the first tensor are split along it.
        init_weights: initialises the parameters and buffers of one module from the meta device; default: the module's
            `reset_parameters`. What has no values then must be loaded before the first step.
        plan: a plan made before; then `stages`, `microbatches` and `schedule` come from it.

    Raises:
        AlreadyDistributedError, InvalidStagesError, StageNotFoundError, HintNotFoundError, InvalidHintError,
        InvalidOptionError, UnknownScheduleError, InvalidScheduleError, InfeasibleLayoutError, GraphBreakError,
        SharedBufferError, UninitializedModuleError
    """
    if is_distributed(model):
        raise AlreadyDistributedError(type(model).__name__)
    if plan is not None:
        microbatches = plan.microbatches
    if not isinstance(microbatches, int) or microbatches < 1:
        raise InvalidOptionError("microbatches", microbatches, "a positive integer")
    chosen = schedule_text(schedule) if plan is None else plan.schedule
    distribution = Distribution.of(model, mesh, layouts, microbatches, batch_dims)
    install(distribution)
    on_meta = place_buffers(model, mesh.device_type)
    if plan is not None:
        distribution.placement = plan.placement
    distribution.plan = plan or make_plan(distribution, stages, chosen, example_inputs)
    refuse_stale_optimizers(whole_parameters(distribution))
    shard_parameters(distribution, on_meta, init_weights)
    install_state_dict_hooks(distribution)
    watch_optimizers()
    return model
