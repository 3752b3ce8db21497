"""The command `fxpar`: one sub-command per function here; what they need is imported when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from rich.console import Console

from fxpar.bench import BENCHMARKS

if TYPE_CHECKING:
    from fxpar.bench.report import Report, Say


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
        epilog="\n".join(f"{name}: {what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=" or ".join(BENCHMARKS))
    bench.add_argument("--json", action="store_true", help="print one JSON object in place of tables")
    bench.add_argument("--check", action="store_true", help="exit with status 1 when a goal is missed")
    bench.set_defaults(command=_bench)
    return parser


def _bench(options: argparse.Namespace) -> int:
    from fxpar.bench.report import print_report, to_json

    run: Callable[[Say], Report] = import_module(f"fxpar.bench.{options.name}").run
    with Console(stderr=True).status(options.name) as status:
        report = run(status.update)
    if options.json:
        print(to_json(report))
    else:
        print_report(report, Console())
    return 1 if options.check and not report.met else 0
