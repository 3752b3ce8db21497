"""One capture of a forward, compiled under several schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from fxpar.backend import fxpar as compile_by_fxpar


class UnderSchedules:
    """A backend of `torch.compile` that returns fxpar's steps under several schedules; the `chosen` one runs.

    Dynamo captures the forward once for all of them, and that is what takes the time of a compile.
    """

    def __init__(self, schedules: Sequence[str], options: Mapping[str, Any]) -> None:
        self._schedules = schedules
        self._options = options
        self.chosen = schedules[0]

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile a graph under every schedule."""
        steps = {
            schedule: compile_by_fxpar(module, example_inputs, options={**self._options, "schedule": schedule})
            for schedule in self._schedules
        }
        return lambda *args: steps[self.chosen](*args)
