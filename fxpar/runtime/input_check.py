"""Compare the inputs of the ranks of one batch shard, which must be the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxpar.errors import InputMismatchError
from fxpar.ir.capture import Capture
from fxpar.ir.stage import PortKind
from fxpar.model.distribution import Distribution
from fxpar.world.agreement import of_all_ranks
from fxpar.world.checksum import checksum
from fxpar.world.mesh import Mesh, num_batch_shards

_PERIOD = 1024


class InputCheck:
    """Called with the inputs of each step: in some steps, all ranks compare checksums; in others, it does nothing.

    Args:
        names: of the inputs, for messages.
        mesh: ranks that differ only along pipe, y and x must have the same inputs.
    """

    def __init__(self, names: Mapping[str, str], mesh: Mesh) -> None:
        self._names = names
        self._mesh = mesh
        self._num_steps = 0

    def __call__(self, inputs: Mapping[str, Tensor]) -> None:
        """A collective of all ranks in the steps for which `is_checked` returns True.

        Raises:
            InputMismatchError: names the arguments that differ, and the ranks.
            PeerLostError: another rank has ended.
        """
        self._num_steps += 1
        if is_checked(self._num_steps):
            found = of_all_ranks({self._names[key]: checksum(value) for key, value in inputs.items()})
            if problems := differences(found, self._mesh):
                raise InputMismatchError(problems)


def input_check(capture: Capture, distribution: Distribution) -> InputCheck | None:
    """The check for this model; None if no two ranks share a batch shard."""
    mesh = distribution.mesh
    if mesh.num_ranks == num_batch_shards(mesh):
        return None
    inputs = [port.name for port in capture.arguments if port.kind is PortKind.INPUT]
    return InputCheck({name: distribution.input_name(name) for name in inputs}, mesh)


def is_checked(step: int) -> bool:
    """Whether step number `step` of a compiled shape, counted from 1, compares: powers of 2, then every 1024th.

    It depends on the number alone, so that all ranks decide the same.
    """
    return step & (step - 1) == 0 or step % _PERIOD == 0


def differences(of_ranks: list[dict[str, int]], mesh: Mesh) -> list[str]:
    """A message for each argument that differs among ranks of a batch shard."""
    by_shard: dict[int, list[int]] = {}
    for rank in range(mesh.num_ranks):
        by_shard.setdefault(mesh.batch_shard(mesh.coordinate_of(rank)), []).append(rank)
    problems = []
    for shard, (first, *others) in by_shard.items():
        for name in of_ranks[first]:
            different = [rank for rank in others if of_ranks[rank].get(name) != of_ranks[first][name]]
            if different:
                ranks = ", ".join(map(str, different))
                problems.append(f"{name!r} of ranks {ranks} is not that of rank {first} (batch shard {shard})")
    return problems
