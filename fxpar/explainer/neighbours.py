"""What could be changed about a setup: one thing at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from sympy import divisors

from fxpar.config import Options
from fxpar.explainer.setup import Setup
from fxpar.ir.hints import Spec
from fxpar.ir.layout import AXES
from fxpar.ir.remat import POLICIES
from fxpar.ir.storage_options import AUTO
from fxpar.model.resolve_layouts import given_patterns
from fxpar.planner.configuration import SCHEDULES
from fxpar.schedule import INTERLEAVED, NAMED_SCHEDULES

Kind: TypeAlias = Literal["mesh", "microbatches", "schedule", "stages", "layouts", "memory", "communication"]
"""What a change is about."""

_DEFAULT, _DEFAULT_SCHEDULE = Options(), "eager-1f1b"

_MICROBATCHES_PER_RANK = (1, 2, 4)
"""Numbers of microbatches to try, per rank of the pipe axis."""

_MOST_HINTS = 8
"""Of a user's hints, so many are tried without."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a setup: `text` says it as a user would write it, `setup` is what comes out."""

    kind: Kind
    text: str
    setup: Setup


def schedule_changes(setup: Setup) -> Iterator[Change]:
    """Other schedules, and stages balanced by their costs; "interleaved" only if stages may be divided once more."""
    if setup.mesh["pipe"] == 1:
        return
    if isinstance(setup.stages, tuple):
        yield Change("stages", f"stages={len(setup.stages) + 1}", replace(setup, stages=len(setup.stages) + 1))
    num_stages = len(setup.stages) + 1 if isinstance(setup.stages, tuple) else setup.stages
    for name in (*SCHEDULES, INTERLEAVED):
        may_run = {None} if NAMED_SCHEDULES[name].shares_ranks else {None, setup.mesh["pipe"]}
        if name != setup.schedule and num_stages in may_run:
            yield Change("schedule", f'schedule="{name}"', replace(setup, schedule=name))


def option_changes(setup: Setup, *, fits: bool) -> Iterator[Change]:
    """Other options of the backend: less is recomputed if the step fits into memory, and more if it does not."""
    options = setup.options
    own = POLICIES.index(options.remat)
    for policy in POLICIES[:own] if fits else POLICIES[own + 1 :]:
        yield _with_options(setup, "memory", remat=policy)
    if setup.mesh["z"] > 1 and fits and options.gathered_bytes != _DEFAULT.gathered_bytes:
        yield _with_options(setup, "memory", gathered_bytes=_DEFAULT.gathered_bytes)
    if setup.mesh["z"] > 1 and not fits and options.gathered_bytes:
        yield _with_options(setup, "memory", remat="full", gathered_bytes=0)
    if setup.mesh["z"] > 1 and (options.gather_weights, options.reduce_gradients) != (AUTO, AUTO):
        yield _with_options(setup, "memory", gather_weights=AUTO, reduce_gradients=AUTO)
    if options.overlapping != _DEFAULT.overlapping:
        limits = {"gather_ahead_bytes": _DEFAULT.gather_ahead_bytes, "held_reductions": _DEFAULT.held_reductions}
        yield _with_options(setup, "communication", overlap=True, **limits)
    if options.fuse is not True:
        yield _with_options(setup, "communication", fuse=True)


def _with_options(setup: Setup, kind: Kind, **options: Any) -> Change:
    changed = replace(setup, options=replace(setup.options, **options))
    shown = {name: value for name, value in options.items() if value != getattr(setup.options, name)}
    return Change(kind, f"options={shown}", changed)


def layout_changes(setup: Setup, *, ships_plan: bool, hints: Mapping[str, Sequence[Spec]]) -> Iterator[Change]:
    """Without one of the user's hints or all of them, with or without the model's own plan, and with other `hints`.

    Args:
        ships_plan: whether the model has a tensor-parallel plan.
        hints: by pattern of parameter names, hints to try.
    """
    if setup.mesh["x"] * setup.mesh["y"] == 1:
        return
    patterns = list(given_patterns(setup.layouts))
    if setup.layouts != "search" and (patterns or (ships_plan and setup.mesh["x"] > 1)):
        yield Change("layouts", 'layouts="search"', replace(setup, layouts="search"))
    if ships_plan and setup.mesh["x"] > 1 and (patterns or setup.layouts == "search"):
        yield Change("layouts", 'layouts="plan"', replace(setup, layouts="plan"))
    given = {} if setup.layouts is None or isinstance(setup.layouts, str) else dict(setup.layouts)
    if 1 < len(patterns) <= _MOST_HINTS:
        for pattern in patterns:
            rest = {other: hint for other, hint in given.items() if other != pattern}
            yield Change("layouts", f"layouts without the hint for {pattern!r}", replace(setup, layouts=rest))
    for pattern, specs in hints.items():
        for spec in specs:
            text = f"layouts with the hint {pattern!r}: {spec}"
            yield Change("layouts", text, replace(setup, layouts={**given, pattern: spec}))


def microbatch_changes(setup: Setup, batch_size: int | None, *, fits: bool) -> Iterator[Change]:
    """Other numbers of microbatches that divide the batch; without a pipeline, more of them only save memory."""
    pipe, given = setup.mesh["pipe"], setup.microbatches
    wanted = {given // 2, 2 * given} | ({pipe * count for count in _MICROBATCHES_PER_RANK} if pipe > 1 else {1})
    for count in _dividing(wanted - {given}, setup.mesh, batch_size):
        if pipe > 1 or not fits or count < given:
            yield Change("microbatches", f"microbatches={count}", _with_microbatches(setup, count))


def mesh_changes(setup: Setup, batch_size: int | None) -> Iterator[Change]:
    """The meshes in which a factor of one axis's size is another axis's.

    They have the same number of microbatches as far as it divides the batch, or suits a pipe axis that is new, longer
    or gone.
    """
    pipe, given = setup.mesh["pipe"], setup.microbatches
    for mesh in _neighbouring_meshes(setup.mesh):
        wanted = {given}
        if mesh["pipe"] > pipe:
            wanted |= {mesh["pipe"] * count for count in _MICROBATCHES_PER_RANK}
        elif mesh["pipe"] < pipe and mesh["pipe"] == 1:
            wanted.add(1)
        counts = _dividing(wanted, mesh, batch_size) or _dividing(range(1, given), mesh, batch_size)[-1:]
        stages = setup.stages if mesh["pipe"] == pipe else None
        own = mesh["pipe"] != pipe and setup.schedule not in NAMED_SCHEDULES
        moved = replace(setup, mesh=mesh, stages=stages, schedule=_DEFAULT_SCHEDULE if own else setup.schedule)
        for count in counts:
            shown = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
            text = f"init_mesh({shown})" + (f", microbatches={count}" if count != given else "")
            yield Change("mesh", text, _with_microbatches(moved, count))


def _neighbouring_meshes(mesh: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for source in AXES:
        for factor in divisors(mesh[source])[1:]:
            for target in AXES:
                moved = {**mesh, source: mesh[source] // factor, target: mesh[target] * factor}
                # Without x, y is x by another name.
                if target != source and (moved["y"] == 1 or moved["x"] > 1):
                    yield moved


def _dividing(counts: Iterable[int], mesh: Mapping[str, int], batch_size: int | None) -> list[int]:
    """Those of the numbers of microbatches that divide the batch shards of a mesh, ascending."""
    shards = mesh["data"] * mesh["z"]
    return sorted(count for count in counts if count and _divides(batch_size, shards * count))


def _divides(batch_size: int | None, parts: int) -> bool:
    return parts == 1 if batch_size is None else batch_size % parts == 0


def _with_microbatches(setup: Setup, count: int) -> Setup:
    """The same with so many microbatches; a schedule of the user's own is for one number of them."""
    own = count != setup.microbatches and setup.schedule not in NAMED_SCHEDULES
    return replace(setup, microbatches=count, schedule=_DEFAULT_SCHEDULE if own else setup.schedule)
