"""The gradients of one stage, from sums over its microbatches to what is handed to the user."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.mesh import Mesh
from fxpar.runtime.gradients import BatchReduction, reduce_partial, summed_over_z
from fxpar.stage import CompiledReductions, CompiledStage


class StageReduction:
    """The gradients of one stage on their way from sums over its microbatches to what all of them come to.

    What is to be scattered over z starts on its way when this is made; so does everything else that is not shared with
    other stages, once it is not partial over y and x any more.

    Args:
        sums: by parameter.
        stage: whose gradients they are.
        shared: those that other stages have a part in; they are reduced as far as the stage itself can.
    """

    def __init__(self, sums: Mapping[str, Tensor], stage: CompiledStage, shared: Collection[str], mesh: Mesh) -> None:
        self._shared, self._mesh = set(shared), mesh
        self._layouts = {port.name: layout for port, layout in stage.border.gradients.items()}
        self._scattering = None if stage.reductions is None else _Scattering(sums, stage.reductions)
        names = () if stage.reductions is None else stage.reductions.names
        self._reductions: list[BatchReduction] = []
        self.shared: dict[str, Tensor] = {}
        self._reduce({name: gradient for name, gradient in sums.items() if name not in names})

    def scattered(self) -> None:
        """Wait for what is scattered over z, and start the rest of its way.

        Raises:
            PeerLostError: another rank died.
        """
        if self._scattering is not None:
            self._reduce(self._scattering.finish())

    def finish(self) -> dict[str, Tensor]:
        """All that is not shared, once all shards of the batch are in. `scattered` must have been called.

        Raises:
            PeerLostError: another rank died.
        """
        return {name: gradient for reduction in self._reductions for name, gradient in reduction.finish().items()}

    def _reduce(self, gradients: dict[str, Tensor]) -> None:
        reduce_partial(gradients, self._layouts, self._mesh)
        self.shared |= {name: gradients.pop(name) for name in self._shared & gradients.keys()}
        self._reductions.append(BatchReduction(gradients, self._mesh, summed_over_z(self._layouts)))


class _Scattering:
    """Reduce-scatters over z that are under way."""

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
    """The same values, no two at one place: that may be where parameters have one gradient."""
    places = set[int]()
    found = []
    for piece in pieces:
        found.append(piece.clone() if piece.data_ptr() in places else piece)
        places.add(piece.data_ptr())
    return found
