"""The tensor-parallel plan that a model's authors ship, as hints: transformers' `tp_plan`, diffusers' `_tp_plan`.

A key of a plan is the path of a module or a parameter, with `*` for a number; a parameter without a key of its own has
that of its module. Where peft's adapters wrap a module, the key means the wrapped one; theirs are left to the search.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpar.ir.hints import Grouped, Spec
from fxpar.ir.parallel_styles import Style, hint_of_style
from fxpar.model.logical_parameters import LogicalParameter


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A key of a plan and its style, as a user would write them, and the attribute that is the plan."""

    key: str
    style: str
    origin: str


@dataclass(frozen=True, slots=True)
class ShippedPlan:
    """What a model's plans say: a hint for each parameter that they shard, and the entry that it comes from.

    `without_effect` are the entries that no hint comes from, each with the reason. `cuts` are those of a pipeline plan,
    which say what crosses between modules: stages are balanced by their costs instead, and what crosses is traced.
    """

    hints: Mapping[str, Spec]
    sources: Mapping[str, PlanEntry]
    without_effect: Mapping[PlanEntry, str]
    cuts: Sequence[PlanEntry]


def read_shipped_plan(model: nn.Module, parameters: Mapping[str, LogicalParameter], parts: int) -> ShippedPlan | None:
    """The plans of `model`, or of its outermost submodules that ship one; None if there is none.

    An `ep_plan` is asked about parameters that no tensor-parallel plan names: experts, in some models, which it leaves
    to the search.

    Args:
        parameters: those of `model`, by name.
        parts: the size of the axis that plans shard over.

    Raises:
        UnknownStyleError: a plan has a style that nothing here knows.
    """
    plans = list(_plans(model))
    if not plans:
        return None
    hints: dict[str, Spec] = {}
    sources: dict[str, PlanEntry] = {}
    reasons: dict[PlanEntry, str] = {}
    for name, parameter in parameters.items():
        found = next(filter(None, (_styled(plan, name) for plan in plans)), None)
        if found is None:
            continue
        hint = hint_of_style(found.style, parameter.styled, f"{found.entry.key!r} of {found.entry.origin}")
        if hint is None:
            reasons[found.entry] = "leaves the layouts of its parameters to the search"
        elif not _divides(hint, parameter.shape, parts):
            reasons[found.entry] = f"the groups of {name}, {parameter.shape}, do not divide by {parts}"
        else:
            hints[name], sources[name] = hint, found.entry
    used = set(sources.values())
    unused = {
        each.entry: reasons.get(each.entry) or _why_without_effect(each, model, parameters)
        for plan in plans
        for each in plan
        if each.entry not in used
    }
    return ShippedPlan(hints, sources, unused, list(_cuts(model)))


@dataclass(frozen=True, slots=True)
class _Styled:
    """An entry of a plan, and what its key matches."""

    entry: PlanEntry
    style: Style
    pattern: re.Pattern[str]


def _plans(model: nn.Module) -> Iterator[Sequence[_Styled]]:
    """All tensor-parallel plans, then all expert-parallel ones."""
    owners = _owners(model, (*_TENSOR_PARALLEL, *_EXPERT_PARALLEL))
    for attributes in (_TENSOR_PARALLEL, _EXPERT_PARALLEL):
        for path, module in owners:
            attribute = next((attribute for attribute in attributes if _plan_of(module, attribute)), None)
            if attribute is not None:
                plan, origin = _plan_of(module, attribute), _origin(path, attribute)
                yield [_entry(_below(path, key), style, origin) for key, style in plan.items()]


def _owners(model: nn.Module, attributes: Sequence[str]) -> Sequence[tuple[str, nn.Module]]:
    """The outermost modules that have a plan in one of these attributes, with their paths."""
    owners: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{owner}." if owner else "") for owner, _ in owners)
        if not is_inside and any(_plan_of(module, attribute) for attribute in attributes):
            owners.append((path, module))
    return owners


def _cuts(model: nn.Module) -> Iterator[PlanEntry]:
    """The entries of pipeline plans."""
    for path, owner in _owners(model, _PIPELINE):
        for key, values in _plan_of(owner, *_PIPELINE).items():
            crossing = " -> ".join(", ".join(names) for names in values)
            yield PlanEntry(_below(path, key), crossing, _origin(path, *_PIPELINE))


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _origin(path: str, attribute: str) -> str:
    return f"{attribute} of {path}" if path else attribute


_TENSOR_PARALLEL, _EXPERT_PARALLEL, _PIPELINE = ("tp_plan", "_tp_plan"), ("ep_plan",), ("pp_plan",)
"""Where models keep plans: transformers' models in properties, diffusers' in an attribute of their class."""


def _plan_of(module: nn.Module, attribute: str) -> Mapping[str, Any]:
    """The module's own plan. Not what it forwards from a module that it wraps, where the plan's keys start."""
    is_own = attribute in vars(module) or hasattr(type(module), attribute)
    plan = getattr(module, attribute) if is_own else None
    return plan if isinstance(plan, Mapping) else {}


def _entry(key: str, style: Style, origin: str) -> _Styled:
    shown = style if isinstance(style, str) else type(style).__name__
    return _Styled(PlanEntry(key, shown, origin), style, re.compile(re.escape(key).replace(r"\*", r"\d+")))


def _styled(plan: Sequence[_Styled], name: str) -> _Styled | None:
    """The entry for a parameter: the one for itself, or for its module."""
    name = _WRAPPED.sub("", name)
    module, _, _ = name.rpartition(".")
    return next((each for path in (name, module) for each in plan if each.pattern.fullmatch(path)), None)


_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)")
"""Under which names peft's wrappers hold the module that was in their place, and the copy of it that is trained."""


def _why_without_effect(each: _Styled, model: nn.Module, parameters: Mapping[str, LogicalParameter]) -> str:
    """Why there may be no parameter whose hint comes from an entry."""
    names = itertools.chain(parameters, (path for path, _ in model.named_modules()))
    if any(each.pattern.fullmatch(name) for name in names):
        return "other entries say how these parameters are sharded"
    return "names no parameter or module of this model"


def _divides(hint: Spec, shape: tuple[int, ...], parts: int) -> bool:
    """Whether each group of a fused dim has equal shards."""
    groups = [(size, each) for size, each in zip(shape, hint, strict=True) if isinstance(each, Grouped)]
    return all(size % (each.groups * parts) == 0 for size, each in groups)
