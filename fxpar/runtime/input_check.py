"""Compare the inputs of the ranks of one batch shard, which must be the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxpar.errors import InputMismatchError
from fxpar.ir.capture import Capture
from fxpar.ir.stage import PortKind
from fxpar.model.distribution import Distribution
from fxpar.world.agreement import of_all_ranks
from fxpar.world.mesh import Mesh, num_batch_shards

_CHUNK_WORDS = 1 << 20  # bounds what a checksum takes in memory
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


def checksum(value: Tensor) -> int:
    """64 bits that depend on every byte of `value` and on its position, but not on strides.

    The sum, over all words, of a hash of the word times a hash of its position.
    """
    words = _words(value)
    parts = [_weighed(chunk) for chunk in words.split(_CHUNK_WORDS)]
    return int(_weighed(torch.stack(parts)).item())


def _words(value: Tensor) -> Tensor:
    """The bytes of `value` in the order of its elements, as int64, padded with zeros."""
    flat = value.detach().reshape(-1).contiguous().view(torch.uint8)
    padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
    padded[: flat.numel()] = flat
    return padded.view(torch.int64)


def _weighed(words: Tensor) -> Tensor:
    weights = _mixed(torch.arange(1, words.numel() + 1, device=words.device)) | 1
    return _mixed(_folded(words) * weights).sum()


def _mixed(words: Tensor) -> Tensor:
    """A bijective hash: every bit of the result depends on many; constants of SplitMix64 (Steele et al., 2014)."""
    words = _folded(words) * -0x40A7B892E31B1A47
    return _folded(words) * -0x6B2FB644ECCEEE15


def _folded(words: Tensor) -> Tensor:
    """XOR the upper half of each word into the lower, which sums and products never do; a bijection."""
    return words ^ ((words >> 32) & 0xFFFFFFFF)
