"""The tuner: the variants of each problem are timed once per machine, and the fastest is stored on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from fxpar.lowering.triton.plan import Fused, How, Pipelined, Unfused
from fxpar.lowering.triton.tiling import Tiling


@dataclass(frozen=True, slots=True)
class TuningProblem:
    """Everything that the times depend on.

    sizes: matrices, rows, columns and terms of the product. layouts: whether each factor is transposed in memory.
    link: how the GPUs are connected. versions: of the packages that determine the code.
    has_pipelined: whether PyTorch has an op for it.
    """

    op: str
    sizes: tuple[int, int, int, int]
    layouts: str
    dtype: str
    outer: int
    parts: int
    device: str
    link: str
    versions: str
    has_pipelined: bool = False

    def to_json(self) -> str:
        """A canonical text: equal problems have equal texts."""
        return json.dumps(asdict(self), sort_keys=True)


Time = Callable[[How], float]
"""The microseconds that a variant takes; infinity if it is impossible."""


def fastest(
    tilings: Sequence[Tiling], ways: Sequence[Fused], time_us: Time, *, has_pipelined: bool = False
) -> tuple[How, float]:
    """The fastest variant, and its time in microseconds.

    Tilings are compared with the first of `ways` to communicate, then the other ways with the best tiling: the two
    choices hardly depend on each other, since the kernels communicate in segments, not in tiles. `Unfused` is always
    tried, and `Pipelined` if there is such an op.
    """
    times: dict[How, float] = {how: time_us(how) for how in (replace(ways[0], tiling=tiling) for tiling in tilings)}
    if times:
        best = min(times, key=lambda how: times[how])
        assert isinstance(best, Fused)
        others = [replace(way, tiling=best.tiling) for way in ways[1:]]
        times.update({how: time_us(how) for how in others})
    if has_pipelined:
        times[Pipelined()] = time_us(Pipelined())
    times[Unfused()] = time_us(Unfused())
    chosen = min(times, key=lambda how: times[how])
    return chosen, times[chosen]


def gather_variants(tiling: Tiling, block_rows: int) -> list[Fused]:
    """Segments of a whole, half and quarter block, each pulled and pushed."""
    segments = dict.fromkeys(max(1, math.ceil(block_rows / count)) for count in (1, 2, 4))
    return [Fused(tiling, rows, pushes) for pushes in (False, True) for rows in segments]


class Memory:
    """Stored results, one file per problem in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, problem: TuningProblem) -> How | None:
        """The stored result of a problem; None if there is none, or its file is damaged."""
        try:
            found = json.loads(self._path(problem).read_text())
            return _how(found["how"]) if found["problem"] == problem.to_json() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, problem: TuningProblem, how: How, time_us: float) -> None:
        """Store a result, atomically: a concurrent reader finds the old file or the new one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stored = asdict(how) if isinstance(how, Fused) else _NAMES[how]
        text = json.dumps({"problem": problem.to_json(), "how": stored, "time_us": time_us}, indent=1)
        with NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, self._path(problem))

    def _path(self, problem: TuningProblem) -> Path:
        return self._folder / f"{sha256(problem.to_json().encode()).hexdigest()}.json"


_NAMES: dict[How, str | None] = {Unfused(): None, Pipelined(): "pipelined"}


def _how(found: dict[str, Any] | str | None) -> How:
    for how, name in _NAMES.items():
        if found == name:
            return how
    if not isinstance(found, dict):
        raise TypeError(f"expected the fields of a fused variant, found {found!r}")
    how = Fused(**{**found, "tiling": Tiling(**found["tiling"])})
    given = (*asdict(how.tiling).values(), how.segment_rows, how.pushes)
    if not all(isinstance(value, int) for value in given):
        raise TypeError(f"expected numbers and truth values, found {given}")
    return how
