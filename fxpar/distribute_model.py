"""`distribute`: turn a model's parameters into local shards, and its forward into a logical program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fxpar._torch.anomaly import detect_anomalies_in_dtensors
from fxpar._torch.list_ops import register_list_ops
from fxpar.backend import CapturedSteps, fxpar
from fxpar.errors import InvalidOptionError
from fxpar.garbage_collection import garbage_collection_paused
from fxpar.ir.plan import Plan
from fxpar.ir.precision import Precision
from fxpar.make_plan import make_plan
from fxpar.model.assigned_data import let_data_be_assigned
from fxpar.model.checkpoint import install_state_dict_hooks
from fxpar.model.clip import let_torch_clip_over_stages
from fxpar.model.deep_copies import allow_deep_copies
from fxpar.model.distribution import Distribution, whole_parameters
from fxpar.model.equal_values import take_values_of_first_rank
from fxpar.model.logical import install, refuse_distributed
from fxpar.model.optimizer_state import watch_optimizers
from fxpar.model.parameters import shard_parameters
from fxpar.model.resolve_layouts import Layouts
from fxpar.model.stale_optimizers import refuse_stale_optimizers
from fxpar.model.unfrozen import let_modules_unfreeze_all_stages
from fxpar.model.unset import place_buffers
from fxpar.model.whole_state_dict import warn_of_partial_files
from fxpar.progress.display import showing, tell
from fxpar.schedule import GivenSchedule, schedule_text
from fxpar.world.mesh import Mesh, sizes_text


def distribute(
    model: nn.Module,
    mesh: Mesh,
    *,
    stages: Sequence[str] | int | None = None,
    layouts: Layouts = None,
    microbatches: int = 1,
    schedule: GivenSchedule = "eager-1f1b",
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    batch_dims: Mapping[str | int, int | None] | None = None,
    precision: Precision | None = None,
    init_weights: Callable[[nn.Module], None] | None = None,
    plan: Plan | None = None,
) -> nn.Module:
    """Shard `model` over `mesh`, in place, and return it.

    Every parameter becomes a DTensor on the ranks of its stage, each of which holds a shard; parameters of other stages
    are removed. Compile the result with `torch.compile(model, backend="fxpar")`.

    Args:
        model: any module whose forward returns a loss: of its scalar results that require grad, the one under the key
            or in the field "loss", else the first; or one that returns predictions, of which a script computes the
            loss. It may be built under `torch.device("meta")`, see `init_weights`.
        mesh: the mesh, from `init_mesh`.
        stages: paths of the modules that start the second and later stages; or the number of stages, which are then
            balanced by their estimated costs, for which `example_inputs` are needed (default: one for each rank of the
            pipe axis, two for "interleaved", as many as a schedule of your own has).
        layouts: sharding hints. A key is a pattern of parameter names, or of module paths with ":out" for the outputs
            of modules; `*` matches any text, dots included, and of several patterns for one name the last wins. Its
            value has an entry per tensor dim: the mesh axis that shards it ("x" or "y"), None, or `fxpar.Grouped` for a
            fused dim, such as q, k and v in one weight. It may also be a parallel style for the parameters of modules:
            one of torch's, such as `ColwiseParallel()`, or the name of one, such as "colwise". If the mesh has an x
            axis and the model ships a tensor-parallel plan, as those of transformers do, the hints are laid over those
            of the plan. "plan" demands a plan, "search" ignores it. All other layouts are chosen automatically.
        microbatches: how many microbatches the local batch is split into, all of one size.
        schedule: "gpipe", "1f1b", "eager-1f1b", "eager-1f1b-delayed", "interleaved", "zb-h1" or "zb-h2"; or your own: a
            CSV file in the format of `torch.distributed.pipelining`, or a list of actions such as "0F0" for each rank
            of the pipe axis.
        example_inputs: the forward's arguments for a local batch, as a tuple or a dict of keyword arguments; meta
            tensors suffice. They are traced to balance stages and to choose the layouts of parameters that have no
            hint, which are otherwise replicated over x and y.
        batch_dims: name or position of an argument -> its batch dim, or None for one that all microbatches share. By
            default, tensors whose first dim has the size of the first tensor's first dim are split along it.
        precision: the dtypes in which a step computes and reduces gradients (default: as parameters are stored).
        init_weights: called with each module that was built on the meta device and has parameters or buffers of its
            own, to initialise them (default: its `reset_parameters`, if it has one). What is not initialised then must
            be loaded before the first step.
        plan: a plan made before, such as `fxpar.Plan.load("plan.json")`; `stages`, `microbatches` and `schedule` are
            taken from it.

    Raises:
        AlreadyDistributedError, CompiledTooEarlyError, InvalidStagesError, StageNotFoundError, HintNotFoundError,
        InvalidHintError, UnknownStyleError, NoShippedPlanError, PrecisionPatternError, InvalidOptionError,
        UnknownScheduleError, InvalidScheduleError, InfeasibleLayoutError, GraphBreakError, SharedBufferError,
        UninitializedModuleError
    """
    name, start = type(model).__name__, time.perf_counter()
    refuse_distributed(model)
    with showing(f"distribute {name}"):
        count = _checked(microbatches if plan is None else plan.microbatches)
        distribution = Distribution.of(model, mesh, layouts, count, batch_dims, precision)
        install(distribution)
        distribution.tracer.serve(fxpar, CapturedSteps)
        take_values_of_first_rank(distribution)
        on_meta = place_buffers(model, mesh.device_type)
        with garbage_collection_paused():
            distribution.plan = plan or make_plan(distribution, stages, schedule_text(schedule), example_inputs)
        distribution.placement = distribution.plan.placement
        _shard(distribution, on_meta, init_weights)
    tell(f"distributed {name} over {sizes_text(mesh.sizes)} in {time.perf_counter() - start:.1f} s")
    return model


def _checked(microbatches: int) -> int:
    if not isinstance(microbatches, int) or microbatches < 1:
        raise InvalidOptionError("microbatches", microbatches, "a positive integer")
    return microbatches


def _shard(
    distribution: Distribution, on_meta: Mapping[str, nn.Module], init_weights: Callable[[nn.Module], None] | None
) -> None:
    """Make shards of the parameters, as planned, and let PyTorch's parts that meet them know what they are."""
    refuse_stale_optimizers(whole_parameters(distribution))
    shard_parameters(distribution, on_meta, init_weights)
    install_state_dict_hooks(distribution.model)
    allow_deep_copies(distribution)
    watch_optimizers()
    let_torch_clip_over_stages()
    let_modules_unfreeze_all_stages()
    warn_of_partial_files()
    register_list_ops()
    let_data_be_assigned()
    detect_anomalies_in_dtensors()
