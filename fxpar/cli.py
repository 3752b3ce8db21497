"""The command `fxpar`: one function per sub-command, which imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fxpar.analysis import command as reporting
from fxpar.bench import BENCHMARKS
from fxpar.cache import command as keeping
from fxpar.calibrate import command as calibration
from fxpar.demo import command as demonstration
from fxpar.environment import is_first_rank
from fxpar.errors import FxparError
from fxpar.explainer import command as explaining
from fxpar.planner import command as planning
from fxpar.progress.display import say, showing
from fxpar.simulate import command as simulation
from fxpar.survey import command as surveying

if TYPE_CHECKING:
    from fxpar.bench.report import Report

_WIDTH_OF_FILES = 200
"""Columns of output that is not a terminal: wide enough for every table."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: the process's own); returns the exit status.

    The status is 1 if a goal that was to be checked is missed, and 2 if the command fails with an `FxparError`.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except FxparError as error:
        print(f"fxpar: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxpar", description="Train unmodified models on many devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    bench = commands.add_parser(
        "bench",
        help="measure, and hold the figures against their goals",
        description="Measure, and hold the figures against their goals; every ratio is of one run.",
    )
    benchmarks = bench.add_subparsers(required=True, metavar="NAME", title="benchmarks")
    for name, benchmark in BENCHMARKS.items():
        own = benchmarks.add_parser(name, help=benchmark.measures, description=benchmark.measures)
        own.add_argument("--json", action="store_true", help="print one JSON object in place of tables")
        own.add_argument("--check", action="store_true", help="exit with status 1 when a goal is missed")
        own.set_defaults(command=_bench, name=name, mode=None)
        if benchmark.modes:
            _add_modes(own, benchmark.modes)
    what = "print a Markdown table of what benchmarks wrote with --json, a row for every goal"
    tables = benchmarks.add_parser("report", help=what, description=f"{what[0].upper()}{what[1:]}.")
    tables.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON of one run of a benchmark")
    tables.set_defaults(command=_bench_report)

    what = "train a small GPT on four processes of this machine, and compare its losses with those of one process"
    demonstrated = commands.add_parser("demo", help=what, description=f"{what[0].upper()}{what[1:]}.")
    demonstration.add_flags(demonstrated)
    demonstrated.set_defaults(command=_demo)

    what = "predict how long pipeline schedules take, and draw their timelines"
    simulated = commands.add_parser("simulate", help=what, description=f"{what[0].upper()}{what[1:]}.")
    simulation.add_flags(simulated)
    simulated.set_defaults(command=_simulate)

    what = "make one HTML page of a dump: what limits the step, timelines, communication, memory, layouts, passes"
    reported = commands.add_parser("report", help=what, description=f"{what[0].upper()}{what[1:]}.")
    reporting.add_flags(reported)
    reported.set_defaults(command=_report)

    what = "measure the machines that this runs on, alone or under torchrun, and write a cluster file"
    calibrated = commands.add_parser("calibrate", help=what, description=f"{what[0].upper()}{what[1:]}.")
    calibration.add_flags(calibrated)
    calibrated.set_defaults(command=_calibrate)

    what = "find the mesh, schedule and microbatches by which a model trains fastest on a cluster, without it"
    planned = commands.add_parser("plan", help=what, description=f"{what[0].upper()}{what[1:]}.")
    planning.add_flags(planned)
    planned.set_defaults(command=_plan)

    what = "predict a training step on a cluster, without it: what bounds it, and which changes would help most"
    explained = commands.add_parser("explain", help=what, description=f"{what[0].upper()}{what[1:]}.")
    explaining.add_flags(explained)
    explained.set_defaults(command=_explain)

    what = "try which families of transformers' models train on meshes of two and four ranks as on one process"
    surveyed = commands.add_parser("survey", help=what, description=f"{what[0].upper()}{what[1:]}.")
    surveying.add_flags(surveyed)
    surveyed.set_defaults(command=_survey)

    what = "show how much is kept of earlier launches, or clear it"
    kept = commands.add_parser("cache", help=what, description=f"{what[0].upper()}{what[1:]}.")
    keeping.add_flags(kept)
    kept.set_defaults(command=_cache)
    return parser


def _add_modes(parser: argparse.ArgumentParser, modes: Mapping[str, str]) -> None:
    flags = parser.add_mutually_exclusive_group()
    for mode, what in modes.items():
        flags.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=what)


def _bench(options: argparse.Namespace) -> int:
    from fxpar.bench.report import print_report, to_json

    run: Callable[..., Report] = import_module(f"fxpar.bench.{options.name}.run").run
    chosen = {} if options.mode is None else {"mode": options.mode}
    console = _console(quiet=not is_first_rank())
    with showing(options.name):
        report = run(say, **chosen)
    if options.json:
        flags = [] if options.mode is None else [f"--{options.mode}"]
        console.out(to_json(report, " ".join(["fxpar", "bench", options.name, *flags])), highlight=False)
    else:
        print_report(report, console)
    return 1 if options.check and not report.met else 0


def _bench_report(options: argparse.Namespace) -> int:
    from fxpar.bench.markdown import markdown_of, read_report

    print(markdown_of([read_report(path) for path in options.files]))
    return 0


def _demo(options: argparse.Namespace) -> int:
    return demonstration.run(options, _console())


def _simulate(options: argparse.Namespace) -> int:
    return simulation.run(options, _console())


def _report(options: argparse.Namespace) -> int:
    return reporting.run(options, _console())


def _calibrate(options: argparse.Namespace) -> int:
    with showing("calibrate"):
        return calibration.run(options, _console(), say)


def _plan(options: argparse.Namespace) -> int:
    with showing("plan"):
        return planning.run(options, _console(), say)


def _explain(options: argparse.Namespace) -> int:
    with Console(stderr=True).status("explain") as status:
        return explaining.run(options, _console(), status.update)


def _survey(options: argparse.Namespace) -> int:
    return surveying.run(options, _console())


def _cache(options: argparse.Namespace) -> int:
    return keeping.run(options, _console())


def _console(*, quiet: bool = False) -> Console:
    console = Console(quiet=quiet)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console
