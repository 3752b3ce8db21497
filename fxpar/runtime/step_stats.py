"""Figures of a recorded step, for TensorBoard, W&B or a log: `record_steps` and `step_stats`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from fxpar.costs.model_arithmetic import Arithmetic
from fxpar.errors import NoRecordedStepError
from fxpar.model.distribution import Distribution, distribution_of_model
from fxpar.runtime.gathered_step import gather_step
from fxpar.runtime.recorder import Recorder
from fxpar.world.mesh import num_batch_shards


@dataclass(frozen=True, slots=True)
class Recorded:
    """This rank's record of a step, the arithmetic of the whole step, and what it was given in one batch shard."""

    recorder: Recorder
    arithmetic: Arithmetic
    samples: int
    tokens: int


_recorded: WeakKeyDictionary[Distribution, Recorded] = WeakKeyDictionary()
"""The latest recorded step of each model."""

_recording: WeakKeyDictionary[Distribution, int] = WeakKeyDictionary()
"""How many contexts record the steps of each model."""


@contextmanager
def record_steps(model: nn.Module) -> Iterator[None]:
    """Within, steps of `model` are recorded for `step_stats`, which returns the figures of the latest of them.

    A recorded step takes some microseconds longer for each action and collective, on a GPU also for their events. Every
    rank must record the steps that one of them asks figures of.

    Args:
        model: a distributed model, or what `torch.compile` returned for it.

    Raises:
        PlainModelError: `distribute` was not called on it.
    """
    distribution = distribution_of_model(model, "fxpar.record_steps")
    _recording[distribution] = _recording.get(distribution, 0) + 1
    try:
        yield
    finally:
        _recording[distribution] -= 1


def is_recording(distribution: Distribution) -> bool:
    """Whether steps of the model are to be recorded."""
    return _recording.get(distribution, 0) > 0


def remember_recorded(distribution: Distribution, recorded: Recorded) -> None:
    """Let `step_stats` return the figures of this step."""
    _recorded[distribution] = recorded


def step_stats(model: nn.Module) -> dict[str, float]:
    """Figures of the latest step that was recorded, by `record_steps` or the option `timeline`; the same on all ranks.

    A collective of all ranks: each must have recorded the same step.

    - `step_s`: seconds from the begin of the step's program to the end of its gradients, on the slowest rank; the
      optimizer is not in it.
    - `bubble_share`: of all ranks' time in the step, what they run no action: warm-up, drain, waits for other stages.
    - `exposed_communication_s`, `exposed_communication_share`: time, on average over the ranks, in which a rank waits
      for a collective, or for a value of another stage after that was sent. It is part of the bubble as far as it lies
      between actions.
    - `peak_memory_bytes`: the most memory of a rank so far: on a GPU, of its tensors since
      `torch.cuda.reset_peak_memory_stats`; on a CPU, of the whole process.
    - `samples_per_s`, `tokens_per_s`: of all batch shards together. Tokens are the elements of the first argument of
      integers with two dims or more that is split into microbatches; without one, there is no such figure.
    - `flops_per_s`: floating-point operations of the model's matrix products per second and rank, as planned, without
      what is computed again to save memory.
    - `mfu`: the time in which the cluster's rates, in the dtypes of these products, would do them, over the time taken.

    Args:
        model: a distributed model, or what `torch.compile` returned for it.

    Raises:
        PlainModelError: `distribute` was not called on it.
        NoRecordedStepError: no step was recorded on this rank.
        PeerLostError: another rank has ended.
    """
    distribution = distribution_of_model(model, "fxpar.step_stats")
    recorded, mesh = _recorded.get(distribution), distribution.mesh
    if recorded is None:
        raise NoRecordedStepError(type(distribution.model).mro()[1].__name__)
    step = gather_step(recorded.recorder, mesh)
    step_s, shards = 1e-6 * step.step_us, num_batch_shards(mesh)
    rank_s = step_s * mesh.num_ranks
    found = {
        "step_s": step_s,
        "bubble_share": step.bubble_share,
        "exposed_communication_s": 1e-6 * step.exposed_us,
        "exposed_communication_share": step.exposed_us / step.step_us,
        "peak_memory_bytes": float(max(record.peak_bytes for record in step.records)),
        "samples_per_s": recorded.samples * shards / step_s,
        "tokens_per_s": recorded.tokens * shards / step_s,
        "flops_per_s": recorded.arithmetic.flops * shards / rank_s,
        "mfu": 1e-6 * recorded.arithmetic.ideal_us * shards / rank_s,
    }
    return found if recorded.tokens else {name: figure for name, figure in found.items() if name != "tokens_per_s"}
