"""Steps that take turns in one run of all ranks, so that whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fxpar.bench.processors import ProcessorUse, share_of_others

Step: TypeAlias = Callable[[], Any]
"""One step of training, which every rank runs."""

_NEWS_S = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One step on one rank: how long after the common start it ended, and what that took of the processors."""

    seconds: float
    used: ProcessorUse


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of all ranks: until the last of them ended, and the share of the processors that others took."""

    seconds: float
    others: float


def take_turns(steps: dict[str, Step], warm_up: int, repeats: int) -> Mapping[str, list[Sample]]:
    """Samples of every step by name, on this rank; the first `warm_up` rounds are not counted."""
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    for name in alternate(list(steps), warm_up + repeats):
        start, before = meet_on_one_clock(), ProcessorUse.now()
        steps[name]()
        seconds = time.monotonic() - start
        samples[name].append(Sample(seconds, ProcessorUse.now().since(before)))
    return {name: found[warm_up:] for name, found in samples.items()}


def alternate(names: Sequence[str], rounds: int) -> Iterator[str]:
    """All names in every round, backwards in every other: whoever follows whom must not matter."""
    for turn in range(rounds):
        yield from reversed(names) if turn % 2 else names


def meet_on_one_clock() -> float:
    """Wait for all ranks, and give the time of the common start: processes of one kernel share a clock."""
    start = torch.tensor([time.monotonic() + _NEWS_S], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    return start.item()


def turns_of(by_rank: Sequence[Mapping[str, Sequence[Sample]]]) -> dict[str, list[Turn]]:
    """What `take_turns` gave on all ranks of this machine, as turns by name."""
    return {
        name: [
            Turn(max(sample.seconds for sample in samples), share_of_others([sample.used for sample in samples]))
            for samples in zip(*(rank[name] for rank in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }


def median_ms(turns: Sequence[Turn]) -> float:
    """Milliseconds of a step."""
    return 1e3 * statistics.median(turn.seconds for turn in turns)


def median_ratio(turns: Mapping[str, Sequence[Turn]], numerator: str, denominator: str, most_others: float) -> float:
    """The median of the ratios of two steps' times, round by round.

    Rounds in which others took more than `most_others` of the processors during either step do not count, unless no
    round would be left.
    """
    rounds = list(zip(turns[numerator], turns[denominator], strict=True))
    quiet = [(a, b) for a, b in rounds if max(a.others, b.others) <= most_others]
    return statistics.median(a.seconds / b.seconds for a, b in quiet or rounds)
