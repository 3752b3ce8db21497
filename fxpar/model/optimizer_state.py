"""Optimizer state dicts for checkpoints, independent of the mesh: contiguous shards, under the parameters' names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpar._torch.distributed import bypass_in_get_state_dict, load_empty_groups
from fxpar._torch.empty_optimizers import accept_empty_lists
from fxpar.errors import OptimizerAcrossStagesError, OptimizerStateError
from fxpar.model.contiguous_shards import contiguous, placed_like
from fxpar.model.distribution import Distribution, all_distributions, pipelines
from fxpar.world.mesh import Mesh


@functools.cache
def watch_optimizers() -> None:
    """From now on, every optimizer of a distributed model's parameters saves and loads as described in `_Adopted`.

    fxpar finds an optimizer in its first step. Before that it has no state; `get_state_dict` of
    `torch.distributed.checkpoint` makes such a step, with gradients of zero, where there is no state.
    """
    known: WeakSet[Optimizer] = WeakSet()

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in known:
            return
        has_parameters = any(group["params"] for group in optimizer.param_groups)
        stepped = trained_by(optimizer, all_distributions()) if has_parameters else _latest_pipeline()
        _check_treats_parameters_alone(optimizer, stepped)
        known.add(optimizer)
        if stepped:
            _Adopted(optimizer, stepped)

    register_optimizer_step_pre_hook(before_step)
    load_empty_groups(lambda optimizer: isinstance(optimizer.state_dict, _StateDict))
    accept_empty_lists(lambda: bool(_latest_pipeline()))


def trained_by(optimizer: Optimizer, distributions: Iterable[Distribution]) -> list[Distribution]:
    """Those of which the optimizer has parameters on this rank."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [each for each in distributions if each.holds_any_of(held)]


def _latest_pipeline() -> list[Distribution]:
    """The model that an optimizer without parameters is for, as other stages have all that it trains; none without it.

    Where it is for an older model, all that differs is the mesh over which groups are put together.
    """
    return pipelines()[-1:]


def _check_treats_parameters_alone(optimizer: Optimizer, stepped: Sequence[Distribution]) -> None:
    """Of PyTorch's optimizers, only L-BFGS looks at all gradients at once; each stage would go another way.

    Raises:
        OptimizerAcrossStagesError: it is that one, and a model has parameters on other pipe ranks.
    """
    num_parts = max((each.mesh.pipe for each in stepped), default=1)
    if isinstance(optimizer, LBFGS) and num_parts > 1:
        raise OptimizerAcrossStagesError(type(optimizer).__name__, num_parts)


class _Adopted:
    """The hooks by which an optimizer of a distributed model saves and loads.

    `state_dict()` has the format of `get_optimizer_state_dict`: names of parameters instead of their numbers, which
    differ from stage to stage. `load_state_dict` accepts that, too, and leaves out what belongs to other stages.
    Strided shards are saved as contiguous ones, and loaded values get the placements of the parameters. The same holds
    inside `get_state_dict` and `set_state_dict` of `torch.distributed.checkpoint`; there, parameter groups name the
    parameters of all pipe ranks, since a checkpoint has one entry for a group.

    The optimizer may have parameters of several distributed models, whose names then begin with the number of the
    model, in the order in which these were distributed; and others, which have numbers.
    """

    def __init__(self, optimizer: Optimizer, distributions: Sequence[Distribution]) -> None:
        self._optimizer, self._distributions = ref(optimizer), [ref(each) for each in distributions]
        self._is_plain = False
        optimizer.register_state_dict_post_hook(self._after_save)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        bypass_in_get_state_dict(optimizer, _StateDict(self, optimizer), _StateDict(self, None))
        meshes = self._meshes()
        for parameter, state in optimizer.state.items():  # loaded before the first step
            optimizer.state[parameter] = self._placed(parameter, state, meshes)

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What `optimizer.state_dict()` returns."""
        with self._plain():
            packed = type(optimizer).state_dict(optimizer)
        if "param_groups" not in packed:  # a format of its own, as that of an optimizer that holds others
            return packed
        names = dict(enumerate(self._names(optimizer)))
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in packed["param_groups"]]
        return {**packed, "state": _renamed(packed["state"], names), "param_groups": groups}

    def _numbered(self, state_dict: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Convert a state dict by names to one by numbers, of this rank's parameters only.

        A tied parameter may be under any of its names.
        """
        numbers = {name: number for number, name in enumerate(self._names(optimizer))}
        parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        positions = {parameter: number for number, parameter in enumerate(parameters)}
        for prefix, each in self._models().items():
            named = each.model.named_parameters(remove_duplicate=False)
            numbers |= {prefix + name: positions[id(held)] for name, held in named if id(held) in positions}
        counts = itertools.count()
        groups = [
            {**given, "params": [next(counts) for _ in own["params"]]}
            for given, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
        ]
        return {**state_dict, "state": _renamed(state_dict["state"], numbers), "param_groups": groups}

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {key: _contiguous_values(values) for key, values in state_dict["state"].items()}
        groups: list[dict[str, Any]] = state_dict["param_groups"]
        if not self._is_plain:
            groups = [_GroupOfAllStages(group, names) for group, names in self._with_names_of_all_stages(groups)]
        return {**state_dict, "state": state, "param_groups": groups}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert names to numbers, leave out other stages' parameters, and redistribute values to local placements."""
        self._check_groups(state_dict["param_groups"], optimizer.param_groups)
        if any(isinstance(name, str) for group in state_dict["param_groups"] for name in group["params"]):
            state_dict = self._numbered(state_dict, optimizer)
        saved, own = state_dict["param_groups"], optimizer.param_groups
        numbers = [number for group in saved for number in group["params"]]
        parameters = dict(zip(numbers, (p for group in own for p in group["params"]), strict=False))
        meshes = self._meshes()
        state = {
            number: self._placed(parameters[number], values, meshes) if number in parameters else values
            for number, values in state_dict["state"].items()
        }
        groups = [_with_own_names(given, group) for given, group in zip(saved, own, strict=True)]
        return {**state_dict, "state": state, "param_groups": groups}

    def _check_groups(self, saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
        """Check that the saved groups match the optimizer's in number, and have its hyperparameters.

        Raises:
            OptimizerStateError: they do not.
        """
        remedy = "make the optimizer with the same groups of parameters, in the same order"
        if len(saved) != len(own):
            raise OptimizerStateError(f"it has {len(saved)} parameter groups, the optimizer {len(own)}", remedy)
        for number, (given, group) in enumerate(zip(saved, own, strict=True)):
            missing = [key for key in group if key not in given and key != "param_names"]
            if "lr" in missing:  # torch fills in hyperparameters that older releases did not have
                problem = (
                    f"its parameter group {number} has no parameter of this rank's, and so no {', '.join(missing)}"
                )
                raise OptimizerStateError(problem, remedy)

    def _placed(self, parameter: Tensor, values: Mapping[str, Any], meshes: Mapping[int, Mesh]) -> dict[str, Any]:
        """One parameter's state, with the placements of its current state.

        Values of the parameter's shape get the placements of the parameter.
        """
        if not isinstance(parameter, DTensor) or id(parameter) not in meshes:
            return dict(values)
        now, mesh = self._live().state.get(parameter, {}), meshes[id(parameter)]
        return {key: self._placed_value(value, now.get(key), key, parameter, mesh) for key, value in values.items()}

    def _placed_value(self, value: Any, now: Any, key: str, parameter: DTensor, mesh: Mesh) -> Any:
        if not isinstance(value, Tensor) or key == "step":
            return value
        if value.shape == parameter.shape:
            return placed_like(value, parameter, mesh)
        if isinstance(now, DTensor) and now.shape == value.shape:
            return placed_like(value, now, mesh)
        if value.dim() == 0 or isinstance(value, DTensor) or value is not now:
            return value
        # Loaded before the first step, from a single-process checkpoint: what has another shape is replicated.
        replicated = [Replicate()] * parameter.device_mesh.ndim
        return DTensor.from_local(value.to(parameter.device), parameter.device_mesh, replicated, run_check=False)

    def _with_names_of_all_stages(self, groups: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], list[str]]]:
        """Each group, with the names of its parameters on all pipe ranks in the model's order; a collective."""
        models, own = self._models(), self._names(self._live())
        mesh = next(iter(models.values())).mesh
        names = [[own[number] for number in group["params"]] for group in groups]
        of_ranks = [names] * mesh.pipe
        if mesh.pipe > 1:
            dist.all_gather_object(of_ranks, names, group=mesh.group("pipe"))
        of_models = (prefix + name for prefix, each in models.items() for name in each.parameters)
        order = {name: position for position, name in enumerate(of_models)}
        for number, group in enumerate(groups):
            found = {name for of_rank in of_ranks for same in of_rank[number : number + 1] for name in same}
            yield group, sorted(found, key=lambda name: (order.get(name, len(order)), name))

    def _names(self, optimizer: Optimizer) -> list[str]:
        """The names of the optimizer's parameters, in order; "parameter <number>" for those of no distributed model."""
        named = {
            id(parameter): prefix + name
            for prefix, each in self._models().items()
            for name, parameter in each.own_parameters().items()
        }
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        others = itertools.count()  # every rank has these
        return [named.get(id(parameter)) or f"parameter {next(others)}" for parameter in parameters]

    @contextmanager
    def _plain(self) -> Iterator[None]:
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    def _live(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "an optimizer that is gone saves nothing"
        return optimizer

    def _models(self) -> dict[str, Distribution]:
        """The distributed models, by what the names of their parameters begin with."""
        found = [each() for each in self._distributions]
        alive = [each for each in found if each is not None]
        assert len(alive) == len(found), "the optimizer holds parameters of a model that is gone"
        if len(alive) == 1:
            return {"": alive[0]}
        order = all_distributions()
        return {f"{order.index(each)}.": each for each in alive}

    def _meshes(self) -> dict[int, Mesh]:
        """The mesh of each parameter of a distributed model, by its `id`."""
        return {id(held): each.mesh for each in self._models().values() for held in each.own_parameters().values()}


class _StateDict:
    """Replaces `optimizer.state_dict`. Without the optimizer it only compares equal, and does not keep it alive."""

    def __init__(self, adopted: _Adopted, optimizer: Optimizer | None) -> None:
        self._adopted, self._optimizer = adopted, optimizer

    def __call__(self) -> dict[str, Any]:
        assert self._optimizer is not None, "it is only compared with"
        return self._adopted.state_dict(self._optimizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StateDict) and self._adopted is other._adopted

    def __hash__(self) -> int:
        return id(self._adopted)


class _GroupOfAllStages(dict[str, Any]):
    """A parameter group in which setting "params" stores the names of the parameters of all stages.

    torch's `get_optimizer_state_dict` sets it to names, but only to those of this rank's parameters.
    """

    def __init__(self, group: Mapping[str, Any], names: list[str]) -> None:
        super().__init__(group)
        self._names = names

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, list(self._names) if key == "params" else value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # pickled as an ordinary dict


def _renamed(state: Mapping[Any, Any], names: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries whose keys are in `names`, under their new names."""
    return {names[key]: values for key, values in state.items() if key in names}


def _contiguous_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: contiguous(value) if isinstance(value, DTensor) else value for key, value in values.items()}


def _with_own_names(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A loaded group with this rank's `param_names`, which optimizers made from named parameters have."""
    return {**given, "param_names": own["param_names"]} if "param_names" in own else dict(given)
