"""The planned stages of a captured forward: known already, or derived by one rank for all ranks and later launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpar.cache.ambient import ambient_state
from fxpar.cache.derive_once import derive_once
from fxpar.cache.folder import own_cache
from fxpar.cache.own_warnings import give, recorded_warnings
from fxpar.compiler import plan_stages
from fxpar.costs.prices import cluster_of
from fxpar.environment import is_first_rank
from fxpar.ir.capture import Capture
from fxpar.ir.stage import PlannedStage
from fxpar.lowering.vector_isa import find_vector_isa
from fxpar.model.distribution import Distribution
from fxpar.rules import registered_rules


@dataclass(frozen=True, slots=True)
class _Answer:
    """Planned stages, and the texts of the warnings that the planning gave."""

    stages: tuple[PlannedStage, ...]
    warnings: tuple[str, ...]


def planned_stages(
    capture: Capture, distribution: Distribution, boundaries: Sequence[str], *, with_backward: bool = True
) -> tuple[PlannedStage, ...]:
    """The result of `plan_stages`, which one rank calls for all that ask for the same.

    Where it is not the first rank that calls it, that one gives its warnings.

    Raises: what the passes raise.
    """
    own: list[_Answer] = []

    def derive() -> _Answer:
        with recorded_warnings() as texts:
            stages = plan_stages(capture, distribution, boundaries, with_backward=with_backward)
        own.append(_Answer(stages, tuple(texts)))
        return own[0]

    # Whether or not the lowering turns out to need it: what is found is kept for all programs of this machine.
    if distribution.mesh.device_type == "cpu" and own_cache() is not None:
        find_vector_isa()  # while one rank plans
    question = plan_question(capture, distribution, boundaries, with_backward=with_backward)
    answer = derive_once(question, derive, on_disk=may_be_kept(capture))
    if not own and is_first_rank():
        give(answer.warnings)
    return answer.stages


def may_be_kept(capture: Capture) -> bool:
    """Whether `plan_question` says all: nothing is defined by users."""
    return capture.is_self_contained and not registered_rules()


def plan_question(
    capture: Capture, distribution: Distribution, boundaries: Sequence[str], *, with_backward: bool = True
) -> str:
    """All that `plan_stages` depends on, as text; the handle of the model stands in markers, but changes nothing."""
    mesh = distribution.mesh
    given = (
        "plan_stages",
        capture.description,
        mesh,
        mesh.device_type,
        mesh.hosts,
        cluster_of(mesh),
        distribution.hints,
        distribution.dtypes,
        distribution.plan,
        distribution.placement,
        distribution.microbatches_of(capture),
        tuple(boundaries),
        with_backward,
        registered_rules(),
        ambient_state(),
    )
    return "\n".join(map(str, given))
