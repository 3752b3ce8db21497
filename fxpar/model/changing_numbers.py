"""Numbers among the arguments of a forward that change from call to call, such as a weight that is annealed.

A trace has Python numbers as constants, and another value would be another compile. So a number that has changed is
traced as a tensor of no dims from then on, unless the forward needs its value: for a size, a loop, or a decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import never_compiled


class Number:
    """A number as the forward's trace is given it, in 64 bits, as Python's are."""

    def __init__(self, value: float, device_type: str) -> None:
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        self.tensor = torch.tensor(value, dtype=dtype, device="cpu").to(device_type)


class ChangingNumbers:
    """Which numbers of a model's arguments have changed so far, by their positions among all leaves of these."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._first: dict[int, float] = {}
        self._changing: set[int] = set()
        self._traced: set[int] = set()
        self._needed: set[int] = set()

    @never_compiled
    def as_tensors(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any], tuple[int, ...]]:
        """The arguments, with a `Number` in the place of each number that has changed; and the positions of these."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        numbers = {position: leaf for position, leaf in enumerate(leaves) if _is_number(leaf)}
        for position, value in numbers.items():
            if self._first.setdefault(position, value) != value:
                self._changing.add(position)
        replaced = tuple(sorted(numbers.keys() & self._changing - self._needed))
        for position in replaced:
            leaves[position] = Number(leaves[position], self._device_type)
        if replaced:
            args, kwargs = pytree.tree_unflatten(leaves, structure)
        return args, kwargs, replaced

    def note_traced(self, positions: Sequence[int]) -> None:
        """Note that a forward was traced without the values at these positions."""
        self._traced.update(positions)

    def give_up(self, positions: Sequence[int]) -> bool:
        """Let some of these positions be constants, as it was not traced without their values; whether there are any.

        Those that are new are so first, and integers first among them: what decides is mostly an integer.
        """
        new = [position for position in positions if position not in self._traced]
        integers = [position for position in new if isinstance(self._first[position], int)]
        self._needed.update(integers or new or positions)
        return bool(positions)


def _is_number(leaf: object) -> bool:
    """Whether it is a number that a tensor can hold; no truth value, which decides what is computed."""
    return type(leaf) is float or (type(leaf) is int and -(2**63) <= leaf < 2**63)
