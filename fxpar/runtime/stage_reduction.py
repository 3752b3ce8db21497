"""Reduce the gradients of one stage over the mesh, from sums over its microbatches to the final gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.ir.stage import CompiledReductions, CompiledStage, PortKind
from fxpar.runtime.gradients import AxisReductions, AxisSums, Gradient, sums_of_partial, sums_over_batch
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class GradientSums:
    """The sums over mesh axes of gradients that are ready together: where they are partial, then over the batch.

    `shared` are gradients that other stages contribute to: here they are only summed where they are partial.
    """

    of_partial: Sequence[AxisSums]
    over_batch: Sequence[AxisSums]
    shared: tuple[Gradient, ...]

    @classmethod
    def of(cls, gradients: Sequence[Gradient], shared: Collection[str], mesh: Mesh) -> GradientSums:
        """The sums of this rank's `gradients`."""
        own = [each for each in gradients if each.name not in shared]
        parts = tuple(each for each in gradients if each.name in shared)
        return cls(sums_of_partial(gradients, mesh), sums_over_batch(own, mesh), parts)


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """How a stage's gradients are reduced: `scattered` those that are reduce-scattered over z, `direct` all others."""

    stage: int
    direct: GradientSums
    scattered: GradientSums
    reductions: CompiledReductions | None

    @classmethod
    def of(cls, stage: CompiledStage, shared: Collection[str], mesh: Mesh) -> ReductionPlan:
        """The plan of this rank's `stage`; `shared` are the parameters that other stages use, too."""
        dtypes = dict(zip(stage.gradients, stage.gradient_dtypes, strict=True))
        gradients = {
            port.name: Gradient.of(port.name, stage.border.gradients[port], dtypes[port], mesh)
            for port in stage.gradients
            if port.kind is PortKind.PARAMETER
        }
        names = () if stage.reductions is None else stage.reductions.names
        direct = [each for name, each in gradients.items() if name not in names]
        scattered = [gradients[name] for name in names]
        sums = [GradientSums.of(each, shared, mesh) for each in (direct, scattered)]
        return cls(stage.index, sums[0], sums[1], stage.reductions)

    @property
    def shared(self) -> list[Gradient]:
        """The gradients that other stages contribute to."""
        return [*self.direct.shared, *self.scattered.shared]

    @property
    def all_sums(self) -> list[AxisSums]:
        """All sums over axes, in the order in which they start."""
        return [sums for each in (self.direct, self.scattered) for sums in (*each.of_partial, *each.over_batch)]


class StageReduction:
    """The reductions of one stage's gradients, in flight.

    When this is made, the reduce-scatters over z start. The other gradients are reduced over y and x where they are
    partial; then their sums over the batch start, except for gradients that are shared with other stages.

    Args:
        sums: the sums over microbatches, by parameter.
        plan: that of the stage.
    """

    def __init__(self, sums: Mapping[str, Tensor], plan: ReductionPlan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._scattering = None if plan.reductions is None else _Scattering(sums, plan.reductions)
        names = () if plan.reductions is None else plan.reductions.names
        self._reductions: list[AxisReductions] = []
        self.shared: dict[str, Tensor] = {}
        self._reduce({name: gradient for name, gradient in sums.items() if name not in names}, plan.direct)

    def scattered(self) -> None:
        """Wait for the reduce-scatters over z, and start the further reductions of their results.

        Raises:
            PeerLostError: another rank died.
        """
        if self._scattering is not None:
            self._reduce(self._scattering.finish(), self._plan.scattered)

    def finish(self) -> dict[str, Tensor]:
        """Wait for all gradients that are not shared, and return them. `scattered` must have been called.

        Raises:
            PeerLostError: another rank died.
        """
        return {name: gradient for reduction in self._reductions for name, gradient in reduction.finish().items()}

    def _reduce(self, gradients: Mapping[str, Tensor], sums: GradientSums) -> None:
        whole = AxisReductions(gradients, sums.of_partial, self._mesh).finish()
        self.shared |= {each.name: whole.pop(each.name) for each in sums.shared}
        self._reductions.append(AxisReductions(whole, sums.over_batch, self._mesh))


class _Scattering:
    """Reduce-scatters over z, in flight."""

    def __init__(self, sums: Mapping[str, Tensor], reductions: CompiledReductions) -> None:
        self._reductions = reductions
        self._started = reductions.start(*(sums[name] for name in reductions.names))

    def finish(self) -> dict[str, Tensor]:
        try:
            pieces = self._reductions.finish(*self._started)
        except RuntimeError as error:
            raise PeerLostError("gradients to their shards over axis z", None, str(error)) from error
        return dict(zip(self._reductions.names, _apart(pieces), strict=True))


def _apart(pieces: Iterable[Tensor]) -> list[Tensor]:
    """The same values, no two in the same memory: where parameters have the same gradient, they may be."""
    places = set[int]()
    found = []
    for piece in pieces:
        found.append(piece.clone() if piece.data_ptr() in places else piece)
        places.add(piece.data_ptr())
    return found
