"""Layouts: which piece of a logical tensor each rank of the mesh has.

A `Layout` has one placement of a tensor per mesh axis. A shard may start *inside* a dim: with mixed-radix
digits, dim 0 of a fused QKV weight of 3*d rows reads `[3, x, d/x]` when each rank holds its rows of q, k and v,
and a flattened (batch, sequence) dim that is sharded by sequence reads `[B, x, T/x]`. `Shard.outer` is the product of
the digits before the axis, so flattening multiplies it and splitting divides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

AXES = ("pipe", "data", "z", "y", "x")
"""The mesh axes, outermost first: x varies fastest with the rank."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the whole."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each of the axis's `parts` ranks holds one value of a digit of `dim`, after `outer` leading values.

    With outer == 1 and a size that `parts` does not divide the shard is *ragged*: pieces as in torch.chunk.
    """

    dim: int
    parts: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}/{self.outer})"

    def fits(self, size: int) -> bool:
        """Whether a dim of `size` splits evenly into [outer, parts, rest]."""
        return size % (self.outer * self.parts) == 0


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank along the axis holds a contribution; the value is their reduction."""

    op: Literal["sum", "max"] = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement: TypeAlias = Replicate | Shard | Partial
REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a dim read as a mixed-radix number; `axis` names the mesh axis that holds it, if any."""

    size: int
    axis: str | None = None

    def __str__(self) -> str:
        return f"{self.size}@{self.axis}" if self.axis else str(self.size)


def _nest(shards: Sequence[Shard], size: int) -> bool:
    """Whether the shards of one dim, in order of `outer`, are different digits of it; a ragged one must stand alone."""
    if len(shards) == 1 and shards[0].outer == 1:
        return True
    position = 1
    for shard in shards:
        if shard.outer % position != 0 or not shard.fits(size):
            return False
        position = shard.outer * shard.parts
    return True


@dataclass(frozen=True, slots=True)
class Layout:
    """A logical tensor's shape and its placement on every axis where it is not replicated.

    `axes` is in the order of `AXES`. Two shards of one dim must not overlap, and a ragged one stands alone in its dim.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, Shard | Partial], ...] = ()

    def __post_init__(self) -> None:
        names = [axis for axis, _ in self.axes]
        assert names == sorted(set(names), key=AXES.index), f"axes out of order or repeated: {names}"
        for dim, size in enumerate(self.shape):
            assert _nest([shard for _, shard in self._shards_of(dim)], size), f"{self.axes} does not fit {self.shape}"

    def accepts(self, shard: Shard) -> bool:
        """Whether one more axis could be placed as `shard` in addition to the others."""
        shards = [shard, *(held for _, held in self._shards_of(shard.dim))]
        return _nest(sorted(shards, key=lambda item: item.outer), self.shape[shard.dim])

    def _shards_of(self, dim: int) -> list[tuple[str, Shard]]:
        found = [(axis, p) for axis, p in self.axes if isinstance(p, Shard) and p.dim == dim]
        return sorted(found, key=lambda item: item[1].outer)

    def placement(self, axis: str) -> Placement:
        """The placement along `axis`."""
        return dict(self.axes).get(axis, REPLICATE)

    def with_placement(self, axis: str, placement: Placement) -> Layout:
        """The same layout with `placement` along `axis`."""
        placed: dict[str, Shard | Partial] = dict(self.axes)
        placed.pop(axis, None)
        if not isinstance(placement, Replicate):
            placed[axis] = placement
        return Layout(self.shape, tuple((name, placed[name]) for name in AXES if name in placed))

    @property
    def is_partial(self) -> bool:
        """Whether any axis holds unreduced contributions."""
        return any(isinstance(p, Partial) for _, p in self.axes)

    def is_ragged(self, dim: int) -> bool:
        """Whether `dim` is cut into uneven pieces."""
        return any(not shard.fits(self.shape[dim]) for _, shard in self._shards_of(dim))

    def digits(self, dim: int) -> tuple[Digit, ...]:
        """`dim` as mixed-radix digits, most significant first; for a ragged dim, those of the padded dim."""
        digits: list[Digit] = []
        position, size = 1, self.shape[dim]
        for axis, shard in self._shards_of(dim):
            if shard.outer > position:
                digits.append(Digit(shard.outer // position))
            digits.append(Digit(shard.parts, axis))
            position = shard.outer * shard.parts
        rest = -(-size // position)
        if rest != 1 or not digits:
            digits.append(Digit(rest))
        return tuple(digits)

    def local_size(self, dim: int, coordinate: Mapping[str, int]) -> int:
        """The extent of `dim` on the rank at `coordinate` (mesh axis -> index)."""
        if self.is_ragged(dim):
            start, stop = self._ragged_range(dim, coordinate)
            return stop - start
        return math.prod(digit.size for digit in self.digits(dim) if digit.axis is None)

    def local_shape(self, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the piece on the rank at `coordinate`."""
        return tuple(self.local_size(dim, coordinate) for dim in range(len(self.shape)))

    def _ragged_range(self, dim: int, coordinate: Mapping[str, int]) -> tuple[int, int]:
        ((axis, shard),) = self._shards_of(dim)
        size = self.shape[dim]
        chunk = -(-size // shard.parts)
        return min(size, coordinate[axis] * chunk), min(size, (coordinate[axis] + 1) * chunk)

    def ranges(self, dim: int, coordinate: Mapping[str, int]) -> list[tuple[int, int]]:
        """The half-open intervals of `dim` that the rank at `coordinate` holds, in local order."""
        if self.is_ragged(dim):
            return [self._ragged_range(dim, coordinate)]
        digits = self.digits(dim)
        while len(digits) > 1 and digits[-1].axis is None and digits[-2].axis is None:
            digits = (*digits[:-2], Digit(digits[-2].size * digits[-1].size))
        width = digits[-1].size if digits[-1].axis is None else 1
        leading = digits[:-1] if digits[-1].axis is None else digits
        starts = []
        for index in product(*([coordinate[d.axis]] if d.axis else range(d.size) for d in leading)):
            start = 0
            for digit, value in zip(leading, index, strict=True):
                start = start * digit.size + value
            starts.append(start * width)
        return [(start, start + width) for start in starts]

    def __str__(self) -> str:
        dims = [
            "".join(("*" if i else "") + str(d) for i, d in enumerate(self.digits(k))) for k in range(len(self.shape))
        ]
        partial = "".join(f" {p}@{axis}" for axis, p in self.axes if isinstance(p, Partial))
        return f"[{', '.join(dims)}]{partial}"
