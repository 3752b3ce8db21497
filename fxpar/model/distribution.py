"""The record of one distributed model: its plan, and where to find its pieces at run time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import uncompiled
from fxpar.errors import PlainModelError, ReplacedParameterError
from fxpar.ir.capture import Capture
from fxpar.ir.hints import Hints
from fxpar.ir.plan import Plan
from fxpar.ir.precision import Precision
from fxpar.ir.result_gradients import result_of
from fxpar.ir.stage import JointGraph, PlannedStage
from fxpar.ir.trace_forward import ForwardTracer
from fxpar.model.argument_names import argument_names
from fxpar.model.logical_parameters import LogicalParameter, logical_parameters
from fxpar.model.loss_scale import LossScale
from fxpar.model.mixed_precision import in_precision
from fxpar.model.resolve_layouts import Layouts, ResolvedLayouts, resolve_layouts
from fxpar.world.agreement import of_first_rank
from fxpar.world.mesh import Mesh, num_batch_shards
from fxpar.world.uneven_calls import CallWatch

_handles = itertools.count()
_handles_of_copies = itertools.count(-1, -1)
"""Apart, since a rank may copy a model alone, and those of other models must be the same on all ranks."""

_by_handle: WeakValueDictionary[int, Distribution] = WeakValueDictionary()


def has_distributed_model(mesh: Mesh) -> bool:
    """Whether a model of this process is distributed over `mesh`."""
    return any(distribution.mesh is mesh for distribution in _by_handle.values())


class Distribution:
    """One distributed model.

    plan: None while the model is captured in order to make it.
    tracer: captures the forward, and runs its steps.
    placement: the coordinate of each stage on the pipe axis.
    planned: returns the stages that were planned with `plan`, by the signature of the capture, for a compile of the
        same program.
    localized: local graphs, by the graphs that they were made from. Neither they nor `planned` depend on the schedule.
    buffer_stages: the stage that changes a buffer, for all buffers that a captured forward changes.
    foreign_buffers: all names of those that stages of other pipe ranks change.
    unset: the names of this rank's tensors that have no values yet, for a model that was built on the meta device.
    seed, num_steps: decide which random numbers a step draws; `num_steps` counts the steps with grad.
    loss_scale: the factor on the loss while a step runs; None if `precision` has none.
    has_begun: whether a forward was called.
    num_unfrozen: how many parameters were frozen at first, and are trained by now.
    arguments: the pytree structure of the latest call's arguments.
    calls: notices that ranks were called with different shapes.
    compiled: of each step that was compiled, whether with a backward, and its arguments.
    unread_arguments: those that the latest forward with a loss does without.
    losses_are_outside: whether a script computes losses of results.
    has_warned_of_mixing: whether `fxpar.passes.decompose.batch_mixing` has given its warning.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        layouts: ResolvedLayouts,
        parameters: Mapping[str, LogicalParameter],
        microbatches: int,
        batch_dims: Mapping[str | int, int | None],
        precision: Precision | None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.layouts = layouts
        self.parameters = parameters
        self.microbatches = microbatches
        self.batch_dims = batch_dims
        self.precision = precision
        self.loss_scale = LossScale.of(precision, mesh)
        self.plan: Plan | None = None
        self.tracer = ForwardTracer(model)
        self.placement: tuple[int, ...] = ()
        self.planned: dict[str, Callable[[], tuple[PlannedStage, ...]]] = {}
        self.localized: WeakKeyDictionary[fx.GraphModule, JointGraph] = WeakKeyDictionary()
        self.buffer_stages: dict[str, int] = {}
        self.foreign_buffers: set[str] = set()
        self.unset: list[str] = []
        self.handle = next(_handles)
        self.seed, name = of_first_rank((own_seed(), self.handle))
        self._name, self._num_copies = str(name), 0
        self.calls = CallWatch(self._name)
        self.num_steps = 0
        self.has_begun, self.num_unfrozen = False, 0
        self.arguments: pytree.TreeSpec | None = None
        self.compiled: list[tuple[bool, str]] = []
        self.unread_arguments: set[str] = set()
        self.losses_are_outside = False
        self.has_warned_of_mixing = False
        _by_handle[self.handle] = self

    @classmethod
    def of(
        cls,
        model: nn.Module,
        mesh: Mesh,
        layouts: Layouts = None,
        microbatches: int = 1,
        batch_dims: Mapping[str | int, int | None] | None = None,
        precision: Precision | None = None,
    ) -> Distribution:
        """The distribution of `model` as it is, with layouts as users pass them to `distribute`.

        Raises:
            HintNotFoundError, InvalidHintError, UnknownStyleError, NoShippedPlanError: as `resolve_layouts`.
            PrecisionPatternError: as `in_precision`.
        """
        parameters = in_precision(logical_parameters(model), precision)
        resolved = resolve_layouts(layouts, model, parameters, mesh)
        return cls(model, mesh, resolved, parameters, microbatches, batch_dims or {}, precision)

    def of_copy(self, model: nn.Module) -> Distribution:
        """The distribution of `model`, a deep copy of this one's: by the same plan, but of its own tensors.

        Steps of the two have nothing in common; random numbers are those that the original would have drawn.
        """
        path_of = {module: path for path, module in self.model.named_modules()}
        copies = dict(model.named_modules())
        self._num_copies += 1
        found = copy.copy(self)
        found.model, found.tracer = model, self.tracer.of_copy(model)
        found.parameters = {
            fqn: replace(each, homes=tuple((copies[path_of[module]], attribute) for module, attribute in each.homes))
            for fqn, each in self.parameters.items()
        }
        found.loss_scale = LossScale.of(self.precision, self.mesh)
        found.planned, found.localized = {}, WeakKeyDictionary()
        found.buffer_stages, found.foreign_buffers = dict(self.buffer_stages), set(self.foreign_buffers)
        found.unset, found.compiled = list(self.unset), []
        found._name, found._num_copies = f"{self._name}, copy {self._num_copies}", 0
        found.calls = CallWatch(found._name)
        found.handle = next(_handles_of_copies)
        _by_handle[found.handle] = found
        return found

    @property
    def hints(self) -> Hints:
        """The sharding hints: the user's, and those of the model's own plan."""
        return self.layouts.hints

    @property
    def dtypes(self) -> str:
        """Of each parameter, as text: those in which it is stored and used, and its gradient is summed."""
        return "\n".join(f"{p.fqn}: {p.dtype} {p.compute_dtype} {p.reduce_dtype}" for p in self.parameters.values())

    def microbatches_of(self, capture: Capture) -> int:
        """In how many microbatches a captured forward computes a batch: `microbatches`, if that divides the batch."""
        return self.microbatches if capture.microbatches is None else capture.microbatches

    def num_parts(self, capture: Capture) -> int:
        """In how many parts a captured forward computes a batch: microbatches, times batch shards."""
        return self.microbatches_of(capture) * num_batch_shards(self.mesh)

    def is_of_whole_batch(self, capture: Capture) -> bool:
        """Whether a captured forward is of a batch that `microbatches` divides, unlike the last of an epoch."""
        return self.microbatches_of(capture) == self.microbatches

    def input_name(self, name: str) -> str:
        """The name in messages of the input of a step that a port of this name is."""
        position = result_of(name)
        return self.argument_name(int(name)) if position is None else f"the gradient of result {position}"

    def argument_name(self, position: int) -> str:
        """The name in messages of the tensor at `position` among all leaves of the latest call's arguments."""
        if self.arguments is None:
            return f"argument {position}"
        return argument_names(type(self.model).mro()[1], self.arguments)[position]

    @property
    def final_plan(self) -> Plan:
        """The plan, once `distribute` is done."""
        assert self.plan is not None, "the model is not distributed yet"
        return self.plan

    @contextmanager
    def before_plan(self) -> Iterator[None]:
        """Within this context there is no plan, as when it is made: stages planned here are those it was made of."""
        plan, self.plan = self.plan, None
        try:
            yield
        finally:
            self.plan = plan

    def holds_any_of(self, identities: Set[int]) -> bool:
        """Whether one of the model's parameters on this rank has its `id` among `identities`."""
        homes = (parameter.homes[0] for parameter in self.parameters.values())
        return any(id(module._parameters.get(attribute)) in identities for module, attribute in homes)

    def unfreeze(self, names: Iterable[str]) -> list[LogicalParameter]:
        """Let traces from now on train these parameters; returns those that were frozen, as they are now."""
        frozen = [self.parameters[name] for name in dict.fromkeys(names) if not self.parameters[name].requires_grad]
        thawed = [replace(parameter, requires_grad=True) for parameter in frozen]
        self.parameters = {**self.parameters, **{parameter.fqn: parameter for parameter in thawed}}
        self.num_unfrozen += len(thawed)
        return thawed

    def own_parameters(self) -> dict[str, DTensor]:
        """This rank's parameters, as DTensors by name; looked up in each call, since users may replace them.

        Raises:
            ReplacedParameterError: by something else.
        """
        found: dict[str, DTensor] = {}
        for fqn, parameter in self.parameters.items():
            module, attribute = parameter.homes[0]
            held = module._parameters.get(attribute)
            if isinstance(held, DTensor):
                found[fqn] = held
            elif held is not None or attribute in module._parameters:
                kind = "None" if held is None else "a plain tensor"
                raise ReplacedParameterError(f"parameter {fqn}", "the DTensor that distribute has put there", kind)
        return found


def whole_parameters(distribution: Distribution) -> dict[str, nn.Parameter]:
    """The whole parameters of the model, by name, before `shard_parameters` replaces them."""
    found: dict[str, nn.Parameter] = {}
    for fqn, parameter in distribution.parameters.items():
        module, attribute = parameter.homes[0]
        whole = module._parameters[attribute]
        assert whole is not None, f"parameter {fqn} was there when the distribution was made"
        found[fqn] = whole
    return found


def all_distributions() -> list[Distribution]:
    """The distributed models of this process that are alive, oldest first."""
    return [distribution for _, distribution in sorted(_by_handle.items())]


def pipelines() -> list[Distribution]:
    """Those of `all_distributions` of which a rank has a part of the stages alone."""
    return [each for each in all_distributions() if each.mesh.pipe > 1]


def own_seed() -> int:
    """The seed of torch on this rank; that of rank 0 decides which numbers all ranks draw."""
    return torch.initial_seed() % 2**63  # it must fit in an int64 tensor; unseeded, torch draws 64 bits


def distribution_of_model(model: nn.Module, call: str) -> Distribution:
    """The distribution of `model`, or of the module that it was compiled from.

    Args:
        call: the function that needs it, for the message.

    Raises:
        PlainModelError: `distribute` was not called on it.
    """
    root = uncompiled(model)
    for distribution in _by_handle.values():
        if distribution.model is root:
            return distribution
    raise PlainModelError(call, type(root).__name__)


def distribution_of(handle: int) -> Distribution:
    """The distributed model that a marker in a graph refers to."""
    return _by_handle[handle]
