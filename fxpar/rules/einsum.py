"""Sharding rules in einsum notation: `"m k, k n -> m n"`.

Each tensor operand and result lists its dims. A lowercase letter may be sharded, and then is sharded in every operand
and result that has it. An operand without it is replicated; a result without it is a reduction, and so partial.

| written | means |
|---|---|
| `k` | a dim that may be sharded |
| `K` | a dim that every rank needs whole |
| `1` | a dim that is broadcast |
| `...` | the remaining leading dims, each of which may be sharded |
| `()` | a scalar |
| `_` | any shape, always replicated |

`Dim.leading` says what this cannot: dims that a longer dim is split into share its letter, each with the product of the
sizes before it. If "b c" is flattened, then b, c and the long dim have one letter, and c has size(b) leading values.
For a slice of a longer dim, `leading` is the length of the dim divided by that of the slice: a digit after 3 values in
the dim is one after 2 in a slice of two thirds. `Dim.values` says that a dim has several elements for each value of its
letter, which stay together, as the channels of a group do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from string import ascii_lowercase
from typing import Literal, TypeAlias

from fxpar.ir.layout import REPLICATE, Partial, Placement, Shard
from fxpar.rules.rule import OpCall, Operand, Shape, Strategy


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim that may be sharded: `letter`, or the part of it that comes after `leading` values.

    `values` is the number of values of the letter, if the dim has several elements for each of them. `Shard.outer` in
    this dim must be a multiple of `blocks`.
    """

    letter: str
    leading: int | Fraction = 1
    values: int | None = None
    blocks: int = 1


Pattern: TypeAlias = tuple[Dim | None, ...] | None
"""An operand's dims, None for each that must be whole; None for an operand that is always replicated."""


@dataclass(frozen=True, slots=True)
class Einsum:
    """Parsed notation: a pattern for each tensor operand and each result."""

    inputs: tuple[Pattern, ...]
    outputs: tuple[Pattern, ...]

    def strategy(
        self, call: OpCall, operand: Operand, shard: Shard, reduction: Literal["sum", "max"] = "sum"
    ) -> Strategy | None:
        """The strategy in which `operand` is placed as `shard`, or None where a dim cannot be sharded so."""
        is_input = operand.role == "input"
        pattern = (self.inputs if is_input else self.outputs)[operand.index]
        shape = (call.inputs if is_input else call.outputs)[operand.index]
        dim = pattern[shard.dim] if pattern else None
        if shape is None or dim is None or not leaves_no_rank_empty(shape[shard.dim], shard):
            return None
        size = shape[shard.dim]
        cut = _Cut(dim.letter, dim.leading * shard.outer, shard.parts, None if shard.fits(size) else size)
        inputs = cut.placements(self.inputs, call.inputs, REPLICATE)
        outputs = cut.placements(self.outputs, call.outputs, Partial(reduction))
        return None if inputs is None or outputs is None else Strategy(inputs, outputs)


def leaves_no_rank_empty(size: int, shard: Shard) -> bool:
    """Whether `shard` splits a dim of `size` evenly, or unevenly with at least one element for every rank."""
    if shard.fits(size):
        return size > 0
    return shard.outer == 1 and (shard.parts - 1) * -(-size // shard.parts) < size


@dataclass(frozen=True, slots=True)
class _Cut:
    """A letter split into `parts` after `outer` leading values; `ragged` is the size of dims split unevenly."""

    letter: str
    outer: int | Fraction
    parts: int
    ragged: int | None

    def placements(
        self, patterns: Sequence[Pattern], shapes: Sequence[Shape | None], missing: Placement
    ) -> tuple[Placement, ...] | None:
        """The placements of some operands; None if one of them cannot be sharded so."""
        found: list[Placement] = []
        for pattern, shape in zip(patterns, shapes, strict=True):
            placement = self._placement(pattern, shape, missing)
            if placement is None:
                return None
            found.append(placement)
        return tuple(found)

    def _placement(self, pattern: Pattern, shape: Shape | None, missing: Placement) -> Placement | None:
        """The placement of an operand: `missing` if it lacks the letter, None if it cannot be sharded so."""
        if pattern is None or shape is None:
            return REPLICATE
        lacks_letter = True
        for position, dim in enumerate(pattern):
            if dim is None or dim.letter != self.letter:
                continue
            lacks_letter = False
            outer = Fraction(self.outer) / dim.leading
            if outer.denominator == 1 and outer.numerator % dim.blocks == 0:
                shard = Shard(position, self.parts, outer.numerator)
                if self._admits(dim, shape[position], shard):
                    return shard
        return missing if lacks_letter else None

    def _admits(self, dim: Dim, size: int, shard: Shard) -> bool:
        values = dim.values or size
        if self.ragged is None:
            return shard.fits(values)
        return self.outer == 1 and size == self.ragged == values


def parse(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns of the operands and of the results, as text."""
    inputs, arrow, outputs = text.partition("->")
    assert arrow, f"no '->' in {text!r}"
    return _patterns(inputs), _patterns(outputs)


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(pattern.strip() for pattern in text.split(",")) if text.strip() else ()


@cache
def einsum(text: str, slots: tuple[bool, ...], ranks: tuple[int, ...]) -> Einsum:
    """Parse `text`, which names all tensor slots of an op, for a call that fills `slots` with tensors of `ranks`."""
    inputs, outputs = parse(text)
    assert len(inputs) == len(slots), f"{text!r} names {len(inputs)} operands, the op takes {len(slots)}"
    present = [pattern for pattern, filled in zip(inputs, slots, strict=True) if filled]
    rest = _ellipsis_length(present, ranks)
    return Einsum(tuple(pattern(p, rest) for p in present), tuple(pattern(p, rest) for p in outputs))


def _ellipsis_length(patterns: Sequence[str], ranks: Sequence[int]) -> int:
    for pattern, rank in zip(patterns, ranks, strict=True):
        if "..." in pattern:
            return rank - len(pattern.replace("...", "").split())
    return 0


def pattern(text: str, ellipsis_length: int = 0) -> Pattern:
    """One operand's dims from its text."""
    if text == "_":
        return None
    dims: list[Dim | None] = []
    for token in text.replace("()", "").split():
        if token == "...":
            dims.extend(Dim(f"...{i}") for i in range(ellipsis_length))
        else:
            dims.append(_dim(token))
    return tuple(dims)


def _dim(token: str) -> Dim | None:
    assert token == "1" or token.isalpha(), f"{token!r} is no dim"
    return Dim(token) if token.islower() else None


def free_dims(rank: int) -> list[Dim | None]:
    """`rank` different dims that may all be sharded."""
    assert rank <= len(ascii_lowercase), f"a tensor of {rank} dims"
    return [Dim(letter) for letter in ascii_lowercase[:rank]]
