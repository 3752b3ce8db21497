"""Time the graphs of a stage in isolation, on made-up values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.ir.stage import Callables, CompiledStage
from fxpar.schedule import Kind
from fxpar.transport.buffers import Piece

_REPEATS = 5


def profile_stage(stage: CompiledStage) -> dict[Kind, float]:
    """Microseconds of each kind of action that `stage` was compiled for; a collective of the ranks that share it.

    Medians, after one run that is not counted. A stage without gradients has backwards of 0.
    """
    with torch.no_grad():
        times: dict[Kind, float] = {}
        inputs, tangents = _made_up(stage.input_pieces), _made_up(stage.tangent_pieces)
        made, times["F"] = _timed(stage.forward, inputs)
        saved = made[len(stage.outputs) :]
        if stage.backward is not None:
            _, times["B"] = _timed(stage.backward, [*saved, *tangents])
        if stage.split is not None:
            found, times["I"] = _timed(stage.split.inputs, [*stage.split.for_inputs(saved), *tangents])
            carried = found[len(stage.returned_edges) :]
            _, times["W"] = _timed(stage.split.weights, [*stage.split.for_weights(saved), *carried])
        if not stage.gradients:
            times |= {"B": 0.0, "I": 0.0, "W": 0.0}
    return times


def _made_up(pieces: Iterable[Tensor]) -> list[Tensor]:
    """Small positive numbers, so that there are no overflows and no subnormal numbers, which are slow on CPUs."""
    return [_filled(Piece.like(piece).empty()) for piece in pieces]


def _filled(value: Tensor) -> Tensor:
    return value.uniform_(0.01, 0.02) if value.is_floating_point() else value.zero_()


def _timed(run: Callables, arguments: Sequence[Tensor]) -> tuple[Sequence[Tensor], float]:
    synchronize: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    found: Sequence[Tensor] = run(*arguments)
    seconds = []
    for _ in range(_REPEATS):
        synchronize()
        begin = time.perf_counter()
        found = run(*arguments)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return found, 1e6 * statistics.median(seconds)
