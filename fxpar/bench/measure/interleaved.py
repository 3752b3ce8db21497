"""Interleaved timing: steps alternate in one run of all ranks, so that disturbances affect all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from fxpar.bench.measure.processors import ProcessorUse, share_of_others
from fxpar.bench.report import Row
from fxpar.calibrate.network import alternate

Step: TypeAlias = Callable[[], Any]
"""One step of training, which every rank runs."""

MOST_OTHERS = 0.12
"""The share of the processors above which other processes disturb a step: it runs again, or does not count.

The services of an idle machine take up to 5% in a step. At 12%, ranks on two cores became slower by no more than the 3%
by which undisturbed rounds differ.
"""

TRIES = 3
"""How often a disturbed step runs before it is reported as disturbed: short disturbances are over by then, and on a
machine that is always busy a benchmark takes three times as long rather than for ever."""

_LEAD_S = 0.1
"""From the agreement on a start to the start itself: by then all ranks must know it and sleep."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A time, the share of the processors that other processes took meanwhile, and the number of runs: of `tries`
    runs, all but the last were disturbed."""

    seconds: float
    others: float
    tries: int = 1

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took so much processor time that the run does not count."""
        return self.others > MOST_OTHERS


class Sample(Timed):
    """One step on one rank, from the common start until it ended there. Ranks differ in `seconds` only."""

    __slots__ = ()


class Timing(Timed):
    """One step of all ranks, from the common start until the last of them ended."""

    __slots__ = ()


T = TypeVar("T", bound=Timed)


def time_interleaved(
    steps: Mapping[str, Step], warm_up: int, repeats: int, tries: int = TRIES
) -> dict[str, list[Sample]]:
    """Samples of every step by name, on this rank; a collective of all ranks. The first `warm_up` rounds do not count.

    A disturbed step is run again at once, up to `tries` times in all; the least disturbed run counts.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    for number, name in enumerate(alternate(list(steps), warm_up + repeats)):
        is_warm_up = number < warm_up * len(steps)
        samples[name].append(least_disturbed(partial(_sample, steps[name]), 1 if is_warm_up else tries))
    return {name: found[warm_up:] for name, found in samples.items()}


def least_disturbed(run: Callable[[], T], tries: int = TRIES) -> T:
    """Call `run` until a run is not disturbed, at most `tries` times; returns the least disturbed."""
    found: list[T] = []
    while not found or (len(found) < tries and found[-1].is_disturbed):
        found.append(run())
    return replace(min(found, key=lambda timed: timed.others), tries=len(found))


def _sample(step: Step) -> Sample:
    """Time a step. The share of others is the same on all ranks, so that all decide equally whether to run it again."""
    start, before = meet_on_one_clock(), ProcessorUse.now()
    step()
    seconds = time.monotonic() - start
    return Sample(seconds, agreed_share_of_others(ProcessorUse.now().since(before)))


def agreed_share_of_others(used: ProcessorUse) -> float:
    """The share of the processors that other processes took, equal on all ranks; a collective within one machine."""
    own = torch.tensor([used.own_s, used.all_s, used.total_s], dtype=torch.float64)
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, own)
    return share_of_others([ProcessorUse(*each.tolist()) for each in by_rank])


def meet_on_one_clock() -> float:
    """Wait for all ranks; returns the time of the common start, by the clock that processes of one machine share."""
    start = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    return start.item()


def timings_of_ranks(by_rank: Sequence[Mapping[str, Sequence[Sample]]]) -> dict[str, list[Timing]]:
    """The timings by name, from the results of `time_interleaved` on all ranks of this machine."""
    return {
        name: [
            Timing(max(sample.seconds for sample in samples), samples[0].others, samples[0].tries)
            for samples in zip(*(rank[name] for rank in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }


def counted(timings: Sequence[Timing]) -> Sequence[Timing]:
    """The undisturbed timings; all of them if every one was disturbed."""
    return [timing for timing in timings if not timing.is_disturbed] or timings


def median_ms(timings: Sequence[Timing]) -> float:
    """The median of the milliseconds of a step, over the rounds that count."""
    return 1e3 * statistics.median(timing.seconds for timing in counted(timings))


def median_ratio(timings: Mapping[str, Sequence[Timing]], numerator: str, denominator: str) -> float:
    """The median of the ratios of two steps' times, round by round.

    Rounds in which either was disturbed do not count, unless no round would be left.
    """
    rounds = list(zip(timings[numerator], timings[denominator], strict=True))
    quiet = [(a, b) for a, b in rounds if not (a.is_disturbed or b.is_disturbed)]
    return statistics.median(a.seconds / b.seconds for a, b in quiet or rounds)


def all_disturbed(*timings: Sequence[Timing]) -> bool:
    """Whether every round has a disturbed step, so that disturbed rounds had to count."""
    return all(any(timing.is_disturbed for timing in each) for each in zip(*timings, strict=True))


def disturbance(timings: Sequence[Timing]) -> Row:
    """Columns of a report: all rounds, those that do not count, repeated runs, and the processor share of others."""
    return {
        "rounds": len(timings),
        "disturbed_rounds": sum(timing.is_disturbed for timing in timings),
        "runs_repeated": sum(timing.tries - 1 for timing in timings),
        "processors_of_others": statistics.median(timing.others for timing in timings),
    }
