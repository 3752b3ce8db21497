"""The command: read the flags, simulate, print and write the results."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fxpar.errors import InvalidCostsError
from fxpar.flags import count
from fxpar.schedule import SCHEDULE_NAMES, Costs, Kind, Timeline
from fxpar.schedule.picture import draw_timelines
from fxpar.schedule.timeline import save_trace
from fxpar.simulate.predict import Prediction, predict_all, predict_named, predict_own
from fxpar.simulate.sources import CostSource, GivenCosts, RecordedCosts

ALL, MEASURED = "all", "measured"
_FLAGS: Mapping[str, Kind] = {"forward": "F", "backward": "B", "input_gradients": "I", "weight_gradients": "W"}
_CAPTION = "bubble: of the ranks' time, what they do not compute; exposed: what free transfers would save"
_MOST_SHOWN = 8  # ranks whose figures fit into a cell of a table


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("costs", nargs="?", type=Path, help="file or folder with costs that a compile has dumped")
    parser.add_argument(
        "--schedule",
        default=ALL,
        help=f"{', '.join(SCHEDULE_NAMES)}, a file of actions (.csv or text), or all (default)",
    )
    parser.add_argument("--microbatches", type=count, metavar="N", help="default: as many as were compiled")
    given = parser.add_argument_group(
        "costs of a chain of stages", "in microseconds: one number for all stages, or one for each, with commas between"
    )
    given.add_argument("--stages", type=count, metavar="N")
    given.add_argument("--ranks", type=count, metavar="N", help="pipe ranks, if fewer than stages")
    given.add_argument("--forward", type=_times, metavar="US")
    given.add_argument("--backward", type=_times, metavar="US", help="default: input and weight gradients together")
    given.add_argument("--input-gradients", type=_times, metavar="US", help="for schedules that split the backward")
    given.add_argument("--weight-gradients", type=_times, metavar="US", help="likewise")
    given.add_argument(
        "--transfer", type=_time, metavar="US", help="of a value or gradient to the next rank; default 0"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the timeline")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline for ui.perfetto.dev")
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="traces of a recorded step, or the folder of them, to lay beside the simulated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of a table")


def run(options: Namespace, console: Console) -> int:
    """Simulate, then print and write the results; returns the exit status.

    Raises InvalidCostsError, InvalidScheduleError, UnknownScheduleError, InvalidTimelineError.
    """
    source, num_microbatches = _source(options)
    predictions, left_out = _predictions(options.schedule, source, num_microbatches)
    measured = Timeline.merge(map(Timeline.load, options.measured)).from_start() if options.measured else None
    timelines = {prediction.schedule.name: prediction.timeline for prediction in predictions}
    timelines |= {MEASURED: measured} if measured else {}
    for path in filter(None, (options.svg, options.trace)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if options.svg:
        beside = measured is not None and len(predictions) == 1
        options.svg.write_text(draw_timelines(_title(predictions, source), timelines, beside=beside), encoding="utf-8")
    if options.trace:
        save_trace(options.trace, timelines)
    rows = [_row(prediction, measured) for prediction in predictions]
    if options.json:
        console.out(json.dumps({"rows": rows, "left_out": {k: str(e) for k, e in left_out.items()}}), highlight=False)
    else:
        console.print(_table(rows, measured))
        if left_out:
            console.print(f"left out: {', '.join(left_out)}; {next(iter(left_out.values()))}", highlight=False)
    return 0


def _title(predictions: Sequence[Prediction], source: CostSource) -> str:
    first = predictions[0].schedule
    name = f"{first.name}: " if len(predictions) == 1 else ""
    return f"{name}{source.num_stages} stages on {source.num_ranks} ranks, {first.num_microbatches} microbatches"


def _predictions(
    asked: str, source: CostSource, num_microbatches: int | None
) -> tuple[list[Prediction], Mapping[str, InvalidCostsError]]:
    path = Path(asked)
    if asked not in (ALL, *SCHEDULE_NAMES) and (path.exists() or path.suffix):
        return [predict_own(path, source, num_microbatches)], {}
    if num_microbatches is None:
        raise InvalidCostsError("expected a number of microbatches, found none", "give --microbatches")
    if asked == ALL:
        return predict_all(source, num_microbatches)
    return [predict_named(asked, source, num_microbatches)], {}


def _source(options: Namespace) -> tuple[CostSource, int | None]:
    """The costs, and how many microbatches to run with them."""
    compute_us = {kind: times for flag, kind in _FLAGS.items() if (times := getattr(options, flag)) is not None}
    given = [options.stages, options.ranks, options.transfer, *compute_us.values()]
    if options.costs is not None:
        if any(value is not None for value in given):
            raise InvalidCostsError(f"expected those in {options.costs} alone, found flags, too", "give either")
        recorded = Costs.load(options.costs)
        return RecordedCosts(recorded), options.microbatches or recorded.num_microbatches
    if options.stages is None or "F" not in compute_us:
        found = "neither a file nor --stages and --forward"
        raise InvalidCostsError(f"found {found}", "give one, or as in --stages 4 --forward 1000 --backward 2000")
    ranks = options.ranks or options.stages
    if options.stages % ranks:
        raise InvalidCostsError(f"{options.stages} stages on {ranks} ranks", f"give a multiple of {ranks} stages")
    return GivenCosts(options.stages, ranks, compute_us, options.transfer or 0.0), options.microbatches


def _row(prediction: Prediction, measured: Timeline | None) -> dict[str, Any]:
    timeline = prediction.timeline
    row = {
        "schedule": prediction.schedule.name,
        "makespan_us": timeline.makespan_us,
        "bubble_share": timeline.bubble_share,
        "exposed_us": prediction.exposed_us,
        "in_flight": prediction.in_flight,
        "peak_bytes": prediction.peak_bytes,
        "busy_us": timeline.busy_us,
    }
    if measured:
        row |= {"measured_us": measured.makespan_us, "ratio": timeline.makespan_us / measured.makespan_us}
    return row


def _table(rows: Sequence[Mapping[str, Any]], measured: Timeline | None) -> Table:
    table = Table(caption=_CAPTION)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "makespan, ms": lambda row: f"{row['makespan_us'] / 1000:,.3f}",
        "bubble": lambda row: f"{row['bubble_share']:.1%}",
        "exposed, ms": lambda row: f"{row['exposed_us'] / 1000:,.3f}",
        "in flight by rank": lambda row: _by_rank(row["in_flight"]),
    }
    if any(row["peak_bytes"] for row in rows):
        columns["peak MiB by rank"] = lambda row: _by_rank([f"{peak / 2**20:.1f}" for peak in row["peak_bytes"]])
    if measured:
        columns["measured, ms"] = lambda row: f"{row['measured_us'] / 1000:,.3f}"
        columns["simulated / measured"] = lambda row: f"{row['ratio']:.3f}"
    table.add_column("schedule")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["schedule"], *(shown(row) for shown in columns.values()))
    return table


def _by_rank(figures: Sequence[object]) -> str:
    shown = " ".join(map(str, figures[:_MOST_SHOWN]))
    return f"{shown} ..." if len(figures) > _MOST_SHOWN else shown


def _time(text: str) -> float:
    time_us = float(text)
    if not 0 <= time_us < float("inf"):
        raise ValueError
    return time_us


def _times(text: str) -> list[float]:
    return [_time(part) for part in text.split(",")]
