"""The command: measure, print the results, and write the cluster file."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fxpar.calibrate.calibrate import Calibration, calibrate
from fxpar.environment import is_first_rank
from fxpar.world.launch import join_world


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--save", type=Path, default=Path("cluster.json"), metavar="FILE", help="where to write (default: cluster.json)"
    )
    parser.add_argument("--name", default="measured", help="what to call the cluster")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of tables")


def run(options: Namespace, console: Console, say: Callable[[str], None]) -> int:
    """Measure on all ranks; the first writes and prints. Returns the exit status."""
    found = calibrate(options.name, join_world(), say)
    if is_first_rank():
        options.save.parent.mkdir(parents=True, exist_ok=True)
        found.cluster.save(options.save)
        if options.json:
            console.out(json.dumps(asdict(found)), highlight=False)
        else:
            print_calibration(found, console)
            console.print(f"written to {options.save}", highlight=False)
    dist.destroy_process_group()
    return 0


def print_calibration(found: Calibration, console: Console) -> None:
    """Tables of what was measured, and of the cluster."""
    console.print(_matmuls(found))
    if found.collectives:
        console.print(_collectives(found))
    console.print(_cluster(found))


def _matmuls(found: Calibration) -> Table:
    table = Table("dtype", "GFLOP/s of products of square matrices, by rows", title="matrix products of one rank")
    for dtype, rates in groupby(found.matmuls, key=lambda each: each.dtype):
        table.add_row(dtype, "  ".join(f"{each.size}: {each.flops_per_us / 1e3:,.1f}" for each in rates))
    return table


def _collectives(found: Calibration) -> Table:
    table = Table("place", "collective", "ranks", title="collectives: ms, by MB that each rank sends")
    for column in ("times", "largest, MB/s"):
        table.add_column(column, justify="right")
    for (place, kind), same in groupby(found.collectives, key=lambda each: (each.place, each.kind)):
        timed = list(same)
        times = "  ".join(f"{each.bytes_sent / 1e6:.3f}: {each.time_us / 1e3:.3f}" for each in timed)
        rate = timed[-1].bytes_sent / timed[-1].time_us
        table.add_row(place, kind, str(timed[-1].num_ranks), times, f"{rate:,.1f}")
    return table


def _cluster(found: Calibration) -> Table:
    table = Table("figure", "value", title=found.cluster.name)
    for figure, value in asdict(found.cluster).items():
        if figure != "name":
            shown = "  ".join(f"{k}: {v:.4g}" for k, v in value.items()) if isinstance(value, dict) else value
            table.add_row(figure, f"{shown:.4g}" if isinstance(shown, float) else str(shown))
    return table
