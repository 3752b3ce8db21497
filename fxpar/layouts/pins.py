"""Layouts that are given rather than searched for: hints on parameters, and layouts chosen by other stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpar.ir.hints import Grouped, Spec
from fxpar.ir.layout import REPLICATE, Layout, Placement, Replicate, Shard
from fxpar.ir.stage import Port


@dataclass(frozen=True, slots=True)
class Pin:
    """The layout that a value must have.

    `shards` has, for each axis that shards it, the dim and `Shard.outer`, or None to leave the digit of the dim
    open. Along all other axes the value is replicated, or free if `leaves_others`.

    A pin that is `fixed_at_use` holds for every reader, too: the value is neither gathered nor sliced.
    """

    shards: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    fixed_at_use: bool = False
    leaves_others: bool = False

    @classmethod
    def hinted(cls, spec: Spec) -> Pin:
        """The pin of a hinted weight; a plain axis leaves the digit of a fused dim to the search.

        So are axes that the hint does not name, unless it names none at all: such a weight is replicated.
        """
        shards: dict[str, tuple[int, int | None]] = {}
        for dim, entry in enumerate(spec):
            if isinstance(entry, Grouped):
                shards[entry.axis] = (dim, entry.groups)
            elif entry is not None:
                shards[entry] = (dim, None)
        return cls(shards, fixed_at_use=True, leaves_others=bool(shards))

    @classmethod
    def exactly(cls, layout: Layout, *, fixed_at_use: bool = False) -> Pin:
        """The pin of a value whose layout is `layout`."""
        assert not layout.is_partial, f"a value cannot be pinned to {layout}: it is not reduced"
        return cls({axis: (p.dim, p.outer) for axis, p in layout.axes if isinstance(p, Shard)}, fixed_at_use)

    def settles(self, axis: str) -> bool:
        """Whether the pin constrains `axis`."""
        return axis in self.shards or not self.leaves_others

    def allows(self, axis: str, placement: Placement) -> bool:
        """Whether the value may have this placement along `axis`."""
        if axis not in self.shards:
            return isinstance(placement, Replicate)
        dim, outer = self.shards[axis]
        return isinstance(placement, Shard) and placement.dim == dim and outer in (None, placement.outer)

    def seed(self, axis: str, parts: int) -> Placement:
        """A placement that the pin allows, for the search to start from; uneven if `parts` does not divide."""
        if axis not in self.shards:
            return REPLICATE
        dim, outer = self.shards[axis]
        return Shard(dim, parts, outer or 1)


@dataclass(frozen=True, slots=True)
class Pins:
    """The pinned inputs of a stage; inputs that are not named are free, each within what its kind allows."""

    inputs: Mapping[Port, Pin] = field(default_factory=dict)
