"""The names by which profilers show a step: `record_function` ranges of instructions and collectives.

They are in traces of `torch.profiler`, and, under `torch.autograd.profiler.emit_nvtx`, in those of NVIDIA's tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

from torch.profiler import record_function

from fxpar._torch.profiler import is_profiling
from fxpar.lowering.observed_collectives import observing_collectives
from fxpar.runtime.step_state import StepState
from fxpar.schedule import Complete, Compute, Instruction, Reduce, Send, Wait

Observe: TypeAlias = Callable[[Instruction, StepState, Callable[[], Any]], None]
"""Runs an instruction by calling its last argument, and may record the instruction and what is alive after it."""


@contextmanager
def profiler_ranges(observe: Observe | None) -> Iterator[Observe | None]:
    """Within, collectives are ranges while a profiler is active; returns what makes instructions ranges, too.

    Args:
        observe: what else observes the instructions. It is returned as it is if no profiler is active.
    """
    if not is_profiling():
        yield observe
        return

    def run_in_range(instruction: Instruction, state: StepState, run: Callable[[], Any]) -> None:
        name = _name(instruction)
        with record_function(name) if name else nullcontext():
            if observe is None:
                run()
            else:
                observe(instruction, state, run)

    with observing_collectives(_run_collective_in_range):
        yield run_in_range


def _run_collective_in_range(label: str, run: Callable[[], Any]) -> Any:
    with record_function(label):
        return run()


def _name(instruction: Instruction) -> str:
    """An action by its own name, such as 2F0; a message with its axis; "" for what takes no time."""
    match instruction:
        case Compute(action):
            return str(action)
        case Send() | Wait() | Complete():
            return f"{instruction} over pipe"
        case Reduce(stage):
            return f"reduce gradients of stage {stage}"
    return ""
