"""Build schedules, prove that they terminate, and simulate them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fxpar.errors import InvalidCostsError, InvalidScheduleError
from fxpar.schedule import (
    NAMED_SCHEDULES,
    Costs,
    Schedule,
    Timeline,
    build_schedule,
    check_fits,
    check_programs,
    lower,
    named_schedule,
    peak_in_flight,
    peak_memory,
    read_schedule,
    simulate,
)
from fxpar.simulate.sources import CostSource


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a schedule.

    exposed_us: the time that it would save if transfers took none.
    in_flight, peak_bytes: by rank; the latter is empty if the memory of some stage is not known.
    """

    schedule: Schedule
    timeline: Timeline
    exposed_us: float
    in_flight: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def predict_named(name: str, source: CostSource, num_microbatches: int) -> Prediction:
    """The schedule called `name`.

    Raises UnknownScheduleError, InvalidScheduleError, InvalidCostsError.
    """
    num_stages, num_ranks = source.num_stages_for(name), source.num_ranks
    costs = source.costs([stage % num_ranks for stage in range(num_stages)])
    delays = costs.weight_delays(num_microbatches) if named_schedule(name).delays_by_costs else None
    schedule = build_schedule(name, num_stages, num_microbatches, num_ranks=num_ranks, delays=delays)
    return predict(schedule, costs)


def predict_all(source: CostSource, num_microbatches: int) -> tuple[list[Prediction], dict[str, InvalidCostsError]]:
    """All named schedules for these numbers of stages and ranks; for those left out, which cost is missing.

    Raises InvalidCostsError if all are left out.
    """
    predictions, left_out = [], {}
    for name in _fitting(source):
        try:
            predictions.append(predict_named(name, source, num_microbatches))
        except InvalidCostsError as error:
            left_out[name] = error
    if not predictions:
        raise next(iter(left_out.values()))
    return predictions, left_out


def predict_own(path: Path, source: CostSource, num_microbatches: int | None) -> Prediction:
    """The schedule in the file `path`: a CSV file if its name ends in .csv, else a line of actions per rank.

    Raises InvalidScheduleError, InvalidCostsError.
    """
    try:
        schedule = read_schedule(path if path.suffix == ".csv" else path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidScheduleError(f"{path}: expected a file with a line of actions per pipe rank: {error}") from None
    expected_microbatches = num_microbatches or schedule.num_microbatches
    check_fits(schedule, source.num_ranks, source.num_stages, expected_microbatches)
    return predict(schedule, source.costs(schedule.placement))


def predict(schedule: Schedule, costs: Costs) -> Prediction:
    """Simulate `schedule`.

    Raises:
        InvalidScheduleError: there is a deadlock.
        InvalidCostsError: a cost is missing.
    """
    programs = lower(schedule, costs.edges)
    check_programs(programs, schedule, costs.edges)
    timeline = simulate(programs, costs)
    at_best_us = simulate(programs, costs.without_communication()).makespan_us
    knows_memory = len(costs.memory) == costs.num_stages
    peaks = peak_memory(programs, schedule, costs.edges, costs.memory) if knows_memory else ()
    return Prediction(
        schedule,
        timeline,
        timeline.makespan_us - at_best_us,
        peak_in_flight(schedule),
        tuple(peak.peak_bytes for peak in peaks),
    )


def _fitting(source: CostSource) -> Iterator[str]:
    """The named schedules to predict: with one stage per rank, interleaving makes no difference and is left out."""
    for name, schedule in NAMED_SCHEDULES.items():
        several = source.num_stages_for(name) > source.num_ranks
        if several == schedule.shares_ranks:
            yield name
