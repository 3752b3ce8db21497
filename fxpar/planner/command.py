"""`fxpar plan`: from flags to a table of the fastest configurations, and the best of them as a file."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fxpar.errors import ModelFunctionError
from fxpar.flags import count, counts, names
from fxpar.hardware.cluster import cluster_names
from fxpar.ir.layout import AXES
from fxpar.planner.configuration import SCHEDULES
from fxpar.planner.search import MOST_ESTIMATED, SECONDS, Ranked, Ranking, plan

_SHOWN = 10

_OF_THE_MODEL = ("layouts", "batch_dims", "precision")
"""What a function may return for `fxpar plan`; the rest, such as a mesh, is what it searches for."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="a function (also FILE.py:FUNCTION) that returns a model and the arguments of its forward, as a tuple or "
        "a dict, for all ranks together, and maybe a dict of arguments of fxpar.plan or fxpar.explain; it is called "
        "without storage for tensors",
    )
    parser.add_argument(
        "--cluster", required=True, help=f"a file of fxpar calibrate (.json), or one of {', '.join(cluster_names())}"
    )
    parser.add_argument("--ranks", type=count, metavar="N", help="default: those of one host")
    parser.add_argument("--axes", type=names, default=AXES, metavar="AXIS,...", help="that may have several ranks")
    parser.add_argument("--microbatches", type=counts, metavar="N,...", help="numbers to try")
    parser.add_argument("--schedules", type=names, default=SCHEDULES, metavar="NAME,...", help="to try")
    add_limits(parser, "meshes to estimate from graphs", "that; at least one mesh is estimated")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="make the graphs of all layers instead of extrapolating from a few equal ones",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the best as a plan for fxpar.distribute")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of a table")


def add_limits(parser: ArgumentParser, estimated: str, limited: str) -> None:
    """Add flags for the limits of a search: the memory of a rank, how many are `estimated`, and how long.

    `given_limits` returns them. `limited` is what has to end in time, for the help.
    """
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="of a rank; default: that of the cluster")
    parser.add_argument(
        "--most", type=count, metavar="N", help=f"largest number of {estimated}; default: {MOST_ESTIMATED}"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help=f"time limit for {limited}; default: {SECONDS:.0f}")


def given_limits(options: Namespace) -> dict[str, Any]:
    """The limits that have a flag, as keyword arguments of `fxpar.plan` and `fxpar.explain`."""
    memory_bytes = None if options.memory_gib is None else options.memory_gib * 2**30
    limits = {"memory_bytes": memory_bytes, "most": options.most, "seconds": options.seconds}
    return {name: limit for name, limit in limits.items() if limit is not None}


def run(options: Namespace, console: Console, say: Callable[[str], None]) -> int:
    """Search, print the ranking, and write the plan if asked to; returns the exit status."""
    model, batch, settings = load_model(options.model)
    ranking = plan(
        model,
        batch,
        options.cluster,
        options.ranks,
        axes=options.axes,
        microbatches=options.microbatches,
        schedules=options.schedules,
        whole=options.whole,
        say=say,
        **given_limits(options),
        **{name: settings[name] for name in _OF_THE_MODEL if name in settings},
    )
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        ranking.best.plan.save(options.save)
    if options.json:
        console.out(json.dumps(to_json(ranking)), highlight=False)
    else:
        print_ranking(ranking, console)
    return 0


def load_model(name: str) -> tuple[nn.Module, Sequence[Any] | Mapping[str, Any], Mapping[str, Any]]:
    """What the function called `name` returns, on the meta device: a model, a batch, and settings, if there are any.

    Raises:
        ModelFunctionError: there is no such function, or it returns something else.
    """
    where, _, function = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = spec_from_file_location(Path(where).stem, where)
            assert spec is not None and spec.loader is not None, f"{where} ends in .py"
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(where)
        make = getattr(module, function)
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise ModelFunctionError(name, error) from error
    with torch.device("meta"):
        found = make()
    match found:
        case (nn.Module() as model, tuple() | dict() as batch):
            return model, batch, {}
        case (nn.Module() as model, tuple() | dict() as batch, dict() as settings):
            return model, batch, settings
    raise ModelFunctionError(name, f"it returns {_types(found)}")


def _types(found: object) -> str:
    return ", ".join(type(each).__name__ for each in (found if isinstance(found, tuple) else (found,)))


def to_json(ranking: Ranking) -> dict[str, Any]:
    """Everything in the ranking except the plans themselves."""
    return {
        "cluster": ranking.cluster.name,
        "ranked": [_row(each) for each in ranking.ranked],
        "left_out": {str(configuration): reason for configuration, reason in ranking.left_out.items()},
    }


def _row(ranked: Ranked) -> dict[str, Any]:
    estimate = ranked.estimate
    return {
        "mesh": dict(ranked.configuration.mesh),
        "microbatches": ranked.configuration.microbatches,
        "schedule": estimate.plan.schedule,
        "options": dict(estimate.options),
        "step_us": estimate.step_us,
        "compute_us": estimate.compute_us,
        "peak_bytes": estimate.peak_bytes,
        "communication_us": {axis: each.time_us for axis, each in estimate.traffic.items()},
        "communication_bytes": {axis: each.bytes_sent for axis, each in estimate.traffic.items()},
        "drawback": ranked.drawback,
    }


def print_ranking(ranking: Ranking, console: Console) -> None:
    """A table of the ten fastest, and how many others there are."""
    axes = [axis for axis in AXES if any(axis in each.estimate.traffic for each in ranking.ranked)]
    table = Table("configuration", "schedule", "remat", title=f"predicted steps on {ranking.cluster.name}")
    for column in ("step, ms", "computing, ms", "peak GiB", *(f"{axis}, ms" for axis in axes)):
        table.add_column(column, justify="right")
    table.add_column("against the best")
    for each in ranking.ranked[:_SHOWN]:
        estimate = each.estimate
        figures = [estimate.step_us / 1e3, estimate.compute_us / 1e3, estimate.peak_bytes / 2**30]
        times = [estimate.traffic[axis].time_us / 1e3 if axis in estimate.traffic else 0.0 for axis in axes]
        shown = [f"{figure:,.3f}" for figure in (*figures, *times)]
        table.add_row(
            str(each.configuration), estimate.plan.schedule, str(estimate.options["remat"]), *shown, each.drawback
        )
    console.print(table)
    rest = len(ranking.ranked) - _SHOWN
    if rest > 0:
        console.print(f"{rest} more that fit are slower", highlight=False)
    if ranking.left_out:
        configuration, reason = next(iter(ranking.left_out.items()))
        console.print(f"left out: {len(ranking.left_out)}, such as {configuration}: {reason}", highlight=False)
