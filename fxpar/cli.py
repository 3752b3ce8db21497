"""The command `fxpar`: one sub-command per function here; what they need is imported when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from rich.console import Console

from fxpar.bench import BENCHMARKS

if TYPE_CHECKING:
    from fxpar.bench.report import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: the process's own); gives the exit status."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


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
    return parser


def _add_modes(parser: argparse.ArgumentParser, modes: Mapping[str, str]) -> None:
    flags = parser.add_mutually_exclusive_group()
    for mode, what in modes.items():
        flags.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=what)


def _bench(options: argparse.Namespace) -> int:
    from fxpar.bench.report import print_report, to_json

    run: Callable[..., Report] = import_module(f"fxpar.bench.{options.name}").run
    chosen = {} if options.mode is None else {"mode": options.mode}
    with Console(stderr=True).status(options.name) as status:
        report = run(status.update, **chosen)
    if options.json:
        print(to_json(report))
    else:
        print_report(report, Console())
    return 1 if options.check and not report.met else 0
