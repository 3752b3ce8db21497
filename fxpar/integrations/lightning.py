"""A strategy for the Trainer of Lightning: a LightningModule trains on a mesh, as it is written for one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from fxpar.distribute_model import distribute
from fxpar.errors import InvalidOptionError, OptimizerStateError
from fxpar.integrations.batch_shards import first_ranks
from fxpar.integrations.lightning_checkpoints import load_checkpoint, model_state, optimizer_state, save_checkpoint
from fxpar.integrations.lightning_steps import OF_WHOLE_BATCH, PREFIX, LightningSteps
from fxpar.model.clip import clip_grad_norm_
from fxpar.model.distribution import distribution_of_model
from fxpar.model.unfrozen import agree_on_unfrozen
from fxpar.world.mesh import Mesh, batch_rank, init_mesh, num_batch_shards

T = TypeVar("T")


def _mean(values: Tensor, dim: int) -> Tensor:
    """The mean, of whole numbers as well."""
    return values.mean(dim, dtype=values.dtype if values.is_floating_point() else torch.float32)


_REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "mean": _mean,
    "avg": _mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}
"""By the names that Lightning and `ReduceOp` have for them."""


_FIRST_STEPS: Mapping[TrainerFn, tuple[str, str]] = {
    TrainerFn.FITTING: ("training_step", "fit_loop"),
    TrainerFn.VALIDATING: ("validation_step", "validate_loop"),
    TrainerFn.TESTING: ("test_step", "test_loop"),
    TrainerFn.PREDICTING: ("predict_step", "predict_loop"),
}
"""The step that a run begins with, and the loop of the Trainer that reads its batches."""


class FxparStrategy(ParallelStrategy):
    """Train a LightningModule on a mesh, whose batch shards are the processes that read data.

    The model is distributed when a run begins, before its optimizer is made. Steps of the module are compiled; what
    they log is that of a whole batch, on all ranks: of its microbatches and batch shards, means are averaged and sums
    added up. Checkpoints are folders of shards, to resume from on any mesh.

    Args:
        pipe, data, z, y, x: the sizes of the mesh, as those of `fxpar.init_mesh`.
        cluster: as that of `fxpar.init_mesh`.
        example_batch: a batch of a batch shard, which `training_step` is traced with (default: the first batch of the
            first run's data, which is then read twice).
        options: those of `torch.compile`.
        others: as those of `fxpar.distribute`. Paths of modules are those in the LightningModule, and the one
            argument of the forward is the batch.

    Raises:
        InvalidOptionError: the module optimizes manually, the Trainer has a `precision`, or fp16 needs a loss scale.
        as `fxpar.init_mesh` and `fxpar.distribute`.
    """

    def __init__(
        self,
        pipe: int = 1,
        data: int = 1,
        z: int = 1,
        y: int = 1,
        x: int = 1,
        *,
        cluster: Any = None,
        example_batch: Any = None,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.num_nodes = 1
        self._sizes = {"pipe": pipe, "data": data, "z": z, "y": y, "x": x}
        self._cluster = cluster
        self._example_batch = example_batch
        self._options = dict(options or {})
        self._distributing = _with_prefix(others)
        self._mesh: Mesh | None = None
        self._steps: LightningSteps | None = None
        self._compiled: Any = None

    # Processes

    @property
    def mesh(self) -> Mesh:
        """The mesh, once a run has begun."""
        assert self._mesh is not None, "the Trainer sets up its environment first"
        return self._mesh

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None, "the Trainer sets the devices"
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def is_distributed(self) -> bool:
        """True: data loaders need a sampler."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's batch shard, as the arguments of a DistributedSampler."""
        return {"num_replicas": num_batch_shards(self.mesh), "rank": batch_rank(self.mesh)}

    def set_world_ranks(self) -> None:
        """Tell the environment this process's rank."""
        num_processes = len(self.parallel_devices)
        self.cluster_environment.set_global_rank(self.node_rank * num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * num_processes)
        rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, len(self.parallel_devices), self.num_nodes
            )

    def setup_environment(self) -> None:
        """Connect the processes and make the mesh, in the first run."""
        super().setup_environment()
        self.set_world_ranks()
        _init_dist_connection(self.cluster_environment, "nccl" if self.root_device.type == "cuda" else "gloo")
        if self._mesh is None:
            self._mesh = init_mesh(**self._sizes, device_type=self.root_device.type, cluster=self._cluster)

    def teardown(self) -> None:
        """Leave the shards where they are."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # The model

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are built on the CPU, or without memory if `empty_init`: `distribute` then initialises shards."""
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Distribute the model, if no run before has, and make its optimizer."""
        self.accelerator.setup(trainer)
        if self._steps is None or self._steps.module is not self.lightning_module:
            self._distribute(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _distribute(self, trainer: pl.Trainer) -> None:
        if not self.lightning_module.automatic_optimization:
            raise InvalidOptionError(
                "automatic_optimization", False, "True: a compiled step has forward and backward, and no optimizer"
            )
        steps = LightningSteps.made_of(self.lightning_module)
        if steps is None or distribution_of_model(steps, "FxparStrategy").mesh.sizes != self.mesh.sizes:
            steps = LightningSteps(self.lightning_module)
            distribute(steps, self.mesh, example_inputs=self._example_inputs(trainer, steps), **self._distributing)
        _average_shards(trainer)
        self._steps = steps
        self._compiled = torch.compile(steps, backend="fxpar", options={**self._options, "results": "local"})

    def _example_inputs(self, trainer: pl.Trainer, steps: LightningSteps) -> tuple[Any] | None:
        """What the forward is traced with: the example batch, or the first one that the run reads."""
        hook, loop_name = _FIRST_STEPS[TrainerFn.FITTING if self._example_batch is not None else trainer.state.fn]
        takes_index = is_param_in_hook_signature(getattr(self.lightning_module, hook), "batch_idx", min_args=2)
        steps.choose(hook, *((0,) if takes_index else ()))
        if self._example_batch is not None:
            return (self._example_batch,)
        loop = getattr(trainer, loop_name)
        loop.setup_data()
        with isolate_rng():
            return self._first_batch(loop._combined_loader)

    def _first_batch(self, loader: CombinedLoader | None) -> tuple[Any] | None:
        """The first batch that a run reads, in an iteration of its own; None if it reads nothing."""
        if loader is None:
            return None
        own = tree_map_only(DataLoader, _without_iterator, loader.iterables)
        read = next(iter(CombinedLoader(own, loader._mode)), None)
        if read is None:
            return None
        batch = self.lightning_module._on_before_batch_transfer(read[0], dataloader_idx=0)
        return (self.batch_to_device(batch),)

    def model_to_device(self) -> None:
        """Tell the module its device; its shards are there."""
        self.lightning_module.to(self.root_device)

    # Steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let all stages know of parameters that callbacks have unfrozen for this epoch."""
        if batch_idx == 0:
            assert self._steps is not None, "the Trainer sets up the strategy first"
            agree_on_unfrozen(distribution_of_model(self._steps, "FxparStrategy"))

    def training_step(self, *args: Any, **named: Any) -> Any:
        """Run a step with its backward; `loss.backward()` returns its gradients."""
        return self._run("training_step", *args, **named)

    def validation_step(self, *args: Any, **named: Any) -> Any:
        """Run the forwards of the module's step of this name."""
        return self._run("validation_step", *args, **named)

    def test_step(self, *args: Any, **named: Any) -> Any:
        """Run the forwards of the module's step of this name."""
        return self._run("test_step", *args, **named)

    def predict_step(self, *args: Any, **named: Any) -> Any:
        """Run the forwards of the module's step of this name."""
        return self._run("predict_step", *args, **named)

    def _run(self, hook: str, batch: Any, *indices: int) -> Any:
        """Run a step, log what it logs, and return the rows of its results that belong to this rank's batch shard."""
        assert self._steps is not None, "the Trainer sets up the strategy first"
        self._steps.choose(hook, *indices)
        return self._steps.run(self._compiled, batch)

    # Precision and clipping

    @property
    def precision_plugin(self) -> PrecisionPlugin:
        """The plugin that clips gradients."""
        return self._precision_plugin or _ClippingOverStages()

    @precision_plugin.setter
    def precision_plugin(self, plugin: PrecisionPlugin | None) -> None:
        if plugin is not None and type(plugin) not in (PrecisionPlugin, _ClippingOverStages):
            raise InvalidOptionError(
                "precision", plugin.precision, '"32-true"; give FxparStrategy a fxpar.Precision instead'
            )
        # A strategy that has a plugin before the Trainer gives it one overrules the Trainer's `precision`.
        self._precision_plugin = None if plugin is None else _ClippingOverStages()

    # Collectives: while a step is traced, those of one process

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return 0 if torch.compiler.is_compiling() else int(super().global_rank)

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its host."""
        return 0 if torch.compiler.is_compiling() else int(super().local_rank)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if torch.compiler.is_compiling() else int(super().world_size)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized() and not torch.compiler.is_compiling():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`."""
        if torch.compiler.is_compiling() or not dist.is_initialized():
            return obj
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over batch shards: ranks of one shard have the same value, which counts once in a sum or a mean."""
        if group == OF_WHOLE_BATCH or torch.compiler.is_compiling() or not isinstance(tensor, Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        return _REDUCTIONS[name](self.all_gather(tensor), dim=0)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The values of all batch shards, stacked; on one process, the tensor."""
        if torch.compiler.is_compiling():
            return tensor
        gathered: Tensor = super().all_gather(tensor)
        return gathered[first_ranks(self.mesh)]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so, or any of them."""
        decided = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(decided, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(decided)

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: shards are loaded into the distributed model."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` does."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shards of the model."""
        assert self._steps is not None, "the Trainer sets up the strategy first"
        return model_state(self._steps)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's shards of the optimizer's state."""
        assert self._steps is not None, "the Trainer sets up the strategy first"
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return optimizer_state(self._steps, plain)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder of shards."""
        save_checkpoint(Path(self.broadcast(filepath)), checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of shards, saved on any mesh; or weights, from the file of one process.

        Raises:
            OptimizerStateError: a training cannot resume from a file, whose optimizer states are those of whole
                parameters, by number.
        """
        assert self._steps is not None, "the Trainer sets up the strategy first"
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return load_checkpoint(path, self._steps, self.optimizers, weights_only)
        if self.optimizers:
            raise OptimizerStateError(
                f"{path} is the file of one process, where states have numbers, not names",
                "load its weights into the module before the training, or resume from what FxparStrategy saved",
            )
        whole: dict[str, Any] = super().load_checkpoint(path, weights_only)
        self._steps.load_state_dict({PREFIX + name: value for name, value in whole["state_dict"].items()})
        return whole

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has loaded the model."""


class _ClippingOverStages(PrecisionPlugin):
    """Full precision, whose gradients are clipped by the norm over all stages and shards."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val)


def _average_shards(trainer: pl.Trainer) -> None:
    """Let callbacks that average weights begin with the shards: they have copied the module before there were any.

    Raises:
        InvalidOptionError: one of them would keep the averages of rank 0 alone in checkpoints.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise InvalidOptionError(
                "callbacks", type(callback).__name__, "WeightAveraging, or EMAWeightAveraging, which may be of shards"
            )
        if isinstance(callback, WeightAveraging):
            callback.setup(trainer, trainer.lightning_module, trainer.state.fn)


def _without_iterator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same batches; one with persistent workers has one iterator, which who reads it first moves on."""
    own = copy.copy(loader)
    own._iterator = None
    return own


def _with_prefix(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `fxpar.distribute`, with paths in LightningSteps for those in the LightningModule."""
    named = dict(options)
    if isinstance(stages := named.get("stages"), list | tuple):
        named["stages"] = [PREFIX + path for path in stages]
    if isinstance(layouts := named.get("layouts"), Mapping):
        named["layouts"] = {PREFIX + pattern: hint for pattern, hint in layouts.items()}
    if (precision := named.get("precision")) is not None:
        if precision.loss_scale is not None:
            raise InvalidOptionError(
                "precision.loss_scale", precision.loss_scale, "None: Lightning's loop does not skip steps; use bfloat16"
            )
        named["precision"] = replace(precision, keep=[PREFIX + pattern for pattern in precision.keep])
    return named
