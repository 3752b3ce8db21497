"""`fxpar bench gpu`: a training step on one GPU, in time and memory, against torch.compile of the same model."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import fxpar
from fxpar.bench.models import hugging_face_model
from fxpar.bench.report import Bar, Report, Row, Say, at_most
from fxpar.calibrate.network import alternate

LAYERS, BATCH, LENGTH = 12, 8, 1024
"""GPT-2 as it was published, and a Llama of its size; 8,192 tokens fill a GPU without filling its memory."""

WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

MODELS: dict[str, tuple[str, Mapping[str, float]]] = {
    "llama": ("llama", {}),
    "gpt2 without dropout": ("gpt2", WITHOUT_DROPOUT),
    "gpt2": ("gpt2", {}),
}
"""By name: the architecture, and what is changed in its configuration. Dropout is a row of its own, since its masks are
the same on every mesh, for which attention has no fused kernel."""

STEPS, WARM_UP, REPEATS = 5, 1, 9
"""Several steps follow each other, so that the host runs ahead of the GPU, as in a training that seldom reads a loss.
The first of all compiles, and the first with the optimizer allocates its states."""

GOAL = 1.05
"""fxpar runs the same kernels; what its own step and DTensor's parameters take on the host should be hidden by them."""

MEMORY_GOAL = 1.05
"""On one rank with one microbatch, nothing has to be kept longer than torch.compile keeps it."""

FXPAR, TORCH = "fxpar", "torch.compile"


class NoGpuError(RuntimeError):
    """There is no CUDA device."""


@dataclass(slots=True)
class Training:
    """A compiled model with its batch and optimizer."""

    forward: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    batch: Mapping[str, Any]
    times: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0

    def backward(self) -> None:
        """A step without the optimizer."""
        self.optimizer.zero_grad()
        self.forward(**self.batch)["loss"].backward()

    def step(self) -> None:
        """A whole step."""
        self.backward()
        self.optimizer.step()

    def measure(self, name: str, run: Callable[[], None]) -> None:
        """Record the time of a run, and the most memory above that which is allocated all the time."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            run()
        end.record()
        end.synchronize()
        self.times.setdefault(name, []).append(start.elapsed_time(end) / STEPS)
        self.peak_bytes = torch.cuda.max_memory_allocated() - before


def run(say: Say) -> Report:
    """Takes some three minutes.

    Raises:
        NoGpuError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NoGpuError("fxpar bench gpu: expected a CUDA device, found none; run it on a machine with an NVIDIA GPU")
    rows: list[Row] = []
    bars: list[Bar] = []
    for name in MODELS:
        say(f"{name}: compiling and training it, by fxpar and by torch.compile in turn")
        found, ratios = compare(name)
        rows += found
        bars += ratios
    return Report(rows, bars)


def compare(name: str) -> tuple[list[Row], list[Bar]]:
    """Train a model both ways in turn, in bf16."""
    trainings = trainings_of(name)
    for what in ("forward and backward", "step with AdamW"):
        for way in alternate(list(trainings), WARM_UP + REPEATS):
            training = trainings[way]
            training.measure(what, training.backward if what == "forward and backward" else training.step)
    return rows_of(name, trainings), bars_of(name, trainings)


def trainings_of(name: str) -> dict[str, Training]:
    """Both ways to train one of `MODELS`, neither of which has compiled yet."""
    architecture, changes = MODELS[name]
    without_weights = hugging_face_model(architecture, LAYERS, BATCH, LENGTH).model
    config: Any = without_weights.config
    config.update(changes)
    torch.manual_seed(0)
    model = type(without_weights)(config).to("cuda", torch.bfloat16)
    ids = torch.randint(1000, (BATCH, LENGTH), device="cuda")
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    return {FXPAR: by_fxpar(copy.deepcopy(model), batch), TORCH: by_torch(model, batch)}


def by_fxpar(model: nn.Module, batch: Mapping[str, Any]) -> Training:
    """On a mesh of this process alone, with one microbatch."""
    mesh = fxpar.init_mesh()
    fxpar.distribute(model, mesh, microbatches=1, example_inputs=batch)
    return _training(torch.compile(model, backend="fxpar"), model, batch)


def by_torch(model: nn.Module, batch: Mapping[str, Any]) -> Training:
    """By Inductor in one process."""
    return _training(torch.compile(model), model, batch)


def _training(compiled: Callable[..., Any], model: nn.Module, batch: Mapping[str, Any]) -> Training:
    return Training(compiled, torch.optim.AdamW(model.parameters(), fused=True), batch)


def rows_of(name: str, trainings: Mapping[str, Training]) -> list[Row]:
    """A row for each way and what was timed."""
    return [
        {
            "model": name,
            "by": way,
            "what": what,
            "ms": statistics.median(times[WARM_UP:]),
            "fastest_ms": min(times[WARM_UP:]),
            "peak_mb_beyond_parameters_gradients_and_states": training.peak_bytes / 2**20,
        }
        for way, training in trainings.items()
        for what, times in training.times.items()
    ]


def bars_of(name: str, trainings: Mapping[str, Training]) -> list[Bar]:
    """The ratios, by medians of those of neighbours."""
    ours, theirs = trainings[FXPAR], trainings[TORCH]
    bars = [
        at_most(f"{name}: {what} over torch.compile", _median_ratio(times, theirs.times[what]), GOAL)
        for what, times in ours.times.items()
    ]
    return [
        *bars,
        at_most(f"{name}: peak memory over torch.compile", ours.peak_bytes / theirs.peak_bytes, MEMORY_GOAL),
    ]


def _median_ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times[WARM_UP:], others[WARM_UP:], strict=True))
