"""An `accelerate.Accelerator` for models that `fxpar.distribute` distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import get_mixed_precision_context_manager, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fxpar.errors import InvalidOptionError, NoMeshError, OptimizerStateError
from fxpar.integrations.batch_shards import first_ranks
from fxpar.integrations.checkpoints import load_shards, save_shards
from fxpar.model.clip import clip_grad_norm_
from fxpar.model.distribution import Distribution, distribution_of_model
from fxpar.model.optimizer_state import trained_by
from fxpar.model.whole_state_dict import whole_state_dict
from fxpar.runtime.results import reduce_over_shards
from fxpar.world.agreement import of_all_ranks
from fxpar.world.mesh import Mesh, batch_rank, mesh_of_this_world, num_batch_shards


class FxparAccelerator(Accelerator):
    """An accelerator whose processes are the batch shards of the mesh; ranks that share a shard act as one process.

    Data loaders read this rank's batch shard, `gather` and `reduce` take one value per batch shard, schedulers step as
    often as there are batch shards, gradients are clipped over all stages, and `save_state` and `load_state` are
    collectives that all ranks call. What concerns machines is as before: the main process is rank 0, and prints.

    Call `fxpar.init_mesh` before, and `fxpar.distribute` before optimizers are made. `prepare` then compiles models,
    and does not wrap them.

    Args:
        options: those of `torch.compile`.
        others: as those of `accelerate.Accelerator`.

    Raises:
        NoMeshError: no mesh was made.
        InvalidOptionError: `mixed_precision` is neither "no" nor "bf16", which is `torch.autocast` around the forward.
        PlainModelError: by `prepare`, for a model that was not distributed.
    """

    def __init__(self, *others: Any, options: Mapping[str, Any] | None = None, **named: Any) -> None:
        super().__init__(*others, **named)
        self._follow_mesh(options)

    @classmethod
    def adopt(cls, accelerator: Accelerator, options: Mapping[str, Any] | None = None) -> FxparAccelerator:
        """Change an accelerator that was made by another library to one of this class, in place."""
        accelerator.__class__ = cls
        accelerator._follow_mesh(options)
        adopted: FxparAccelerator = accelerator
        return adopted

    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def _follow_mesh(self, options: Mapping[str, Any] | None) -> None:
        mesh = mesh_of_this_world()
        if mesh is None:
            raise NoMeshError(type(self).__name__)
        if self.mixed_precision not in ("no", "bf16"):
            raise InvalidOptionError(
                "mixed_precision", self.mixed_precision, '"no" or "bf16"; give fxpar.distribute a precision instead'
            )
        self._mesh: Mesh = mesh
        self._options = dict(options or {})
        # A dispatched batch is read by rank 0, and cut by the ranks of processes.
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """The number of batch shards."""
        return num_batch_shards(self._mesh)

    @property
    def process_index(self) -> int:
        """The index of this rank's batch shard."""
        return batch_rank(self._mesh)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Compile the distributed model."""
        compiled = self.compile_model(model)
        self._models.append(compiled)
        return compiled

    def compile_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """The distributed model, compiled with the accelerator's options, and `options` over them."""
        distribution_of_model(model, "FxparAccelerator.prepare")
        compiled = cast(nn.Module, torch.compile(model, backend="fxpar", options={**self._options, **options}))
        if self.native_amp:
            # Results keep the dtype that they are computed in: other stages' have no values to convert.
            compiled.forward = get_mixed_precision_context_manager(True, self.autocast_handler)(compiled.forward)
        return compiled

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> nn.Module:
        """The distributed model, by default without what `prepare` has compiled it to."""
        unwrapped: nn.Module = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return unwrapped

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """A scheduler that steps with the optimizer, once for each batch shard, or once if these split a batch."""
        prepared = _Scheduler(
            scheduler, self._optimizers, step_with_optimizer=self.step_scheduler_with_optimizer, split_batches=True
        )
        prepared.num_steps = 1 if self.split_batches else self.num_processes
        self._schedulers.append(prepared)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """As `fxpar.clip_grad_norm_`: by the norm over all stages and shards."""
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """The values of all batch shards, concatenated on dim 0."""
        ranks = first_ranks(self._mesh)

        def of_shards(gathered: Tensor) -> Tensor:
            chunks = gathered.chunk(self._mesh.num_ranks)
            return torch.cat([chunks[rank] for rank in ranks])

        return recursively_apply(of_shards, super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The values of all batch shards without those that fill the last batch, whether tensors or other objects."""
        are_objects = use_gather_object or not _has_only_tensors(input_data)
        if are_objects and self._mesh.rank not in first_ranks(self._mesh):
            input_data = []  # the lists of all ranks are joined
        return super().gather_for_metrics(input_data, are_objects)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or largest of the values of all batch shards; with "none" the values as they are."""

        def of_shards(value: Tensor) -> Tensor:
            if reduction == "none":
                return value
            op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            reduced = reduce_over_shards(value.clone(), op, "what an accelerator reduces", self._mesh)
            return reduced / self.num_processes if reduction == "mean" else reduced

        return recursively_apply(of_shards, tensor, error_on_other_type=True)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """The part of the inputs that belongs to this rank's batch shard."""
        state = cast(PartialState, self)  # of which the method reads the number of processes, the index and the device
        with PartialState.split_between_processes(state, inputs, apply_padding) as own:
            yield own

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The state dict as one process has it, on the main process; empty on the others. All ranks call it."""
        return whole_state_dict(self._distribution(model).model)

    def save_state(self, output_dir: str, **others: Any) -> str:
        """Save everything that was prepared: models and their optimizers as shards, by all ranks."""
        with self._without_models():
            saved: str = super().save_state(output_dir, **others)
        for name, (model, optimizers) in self._prepared().items():
            save_shards(Path(output_dir) / name, model, optimizers)
        return saved

    def load_state(self, input_dir: str, **others: Any) -> None:
        """Load what `save_state` saved, on any mesh of as many ranks."""
        with self._without_models():
            super().load_state(input_dir, **others)
        for name, (model, optimizers) in self._prepared().items():
            load_shards(Path(input_dir) / name, model, optimizers)

    @contextmanager
    def _without_models(self) -> Iterator[None]:
        """Inside, nothing of models and optimizers is saved or loaded."""
        held = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = held

    def _prepared(self) -> dict[str, tuple[nn.Module, list[Optimizer]]]:
        """Each model with its optimizers, by the folder of its shards; a collective of all ranks.

        Raises:
            OptimizerStateError: an optimizer has parameters of several models.
        """
        distributions = [self._distribution(model) for model in self._models]
        found = {f"shards{index or ''}": (each.model, list[Optimizer]()) for index, each in enumerate(distributions)}
        optimizers = [optimizer.optimizer for optimizer in self._optimizers]
        # A rank may have no parameter of an optimizer.
        own = [[distributions.index(each) for each in trained_by(one, distributions)] for one in optimizers]
        of_ranks = of_all_ranks(own)
        for number, optimizer in enumerate(optimizers):
            owners = {index for of_rank in of_ranks for index in of_rank[number]} or {0}
            if len(owners) > 1:
                problem = f"optimizer {number} has parameters of {len(owners)} models, and is kept with one"
                raise OptimizerStateError(problem, "make an optimizer for each of them")
            list(found.values())[owners.pop()][1].append(optimizer)
        return found

    def _distribution(self, model: nn.Module) -> Distribution:
        return distribution_of_model(self.unwrap_model(model), "FxparAccelerator")


def _has_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


class _Scheduler(AcceleratedScheduler):
    """A scheduler that makes `num_steps` steps in one."""

    num_steps = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.num_steps):
            super().step(*args, **kwargs)
