"""`fxpar explain`: from flags and what the user's function returns to tables, or to JSON."""

from __future__ import annotations

import inspect
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fxpar.analysis.dumped_step import DumpedStep, read_dump
from fxpar.errors import ExplainingError
from fxpar.errors.base import one_of
from fxpar.explainer.dump import dump_to_json, print_dump
from fxpar.explainer.explain import explain
from fxpar.explainer.tables import print_explanation
from fxpar.explainer.to_json import to_json
from fxpar.flags import count
from fxpar.hardware.cluster import cluster_names
from fxpar.planner.command import add_limits, given_limits, load_model

_NOT_SETTINGS = ("model", "batch", "say")


def add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION|DUMP",
        help="a function (also FILE.py:FUNCTION) that returns a model and the arguments of its forward, as a tuple or "
        "a dict, for all ranks together, and maybe a dict of arguments of fxpar.explain, which flags override; it is "
        "called without storage for tensors. Or a folder that a compile with the option dump wrote, without flags",
    )
    parser.add_argument("--mesh", metavar="AXIS=N ...", help='such as "pipe=2 x=4"')
    parser.add_argument("--cluster", help=f"a file of fxpar calibrate (.json), or one of {', '.join(cluster_names())}")
    parser.add_argument("--microbatches", type=count, metavar="N", help="default: 1")
    parser.add_argument("--schedule", metavar="NAME", help="or a CSV file of your own; default: eager-1f1b")
    parser.add_argument(
        "--stages", type=_stages, metavar="N|MODULE,...", help="how many, or the modules that open all but the first"
    )
    parser.add_argument(
        "--layouts", type=_layouts, metavar="plan|search|JSON", help='or hints, such as {"*.fc.weight": ["x", null]}'
    )
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='of torch.compile(..., options=...), such as remat="full"; once for each',
    )
    add_limits(parser, "changed meshes to estimate", "all changes")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of tables")


def run(options: Namespace, console: Console, say: Callable[[str], None]) -> int:
    """Explain, and print what was found; returns the exit status."""
    if Path(options.model).is_dir():
        return _explain_dump(read_dump(Path(options.model)), console, as_json=options.json)
    model, batch, returned = load_model(options.model)
    found = explain(model, batch, say=say, **_settings(options, returned))
    if options.json:
        # Parallel styles and grouped dims in hints are shown as text.
        console.out(json.dumps(to_json(found), default=str), highlight=False)
    else:
        print_explanation(found, console)
    return 0


def _explain_dump(step: DumpedStep, console: Console, *, as_json: bool) -> int:
    if as_json:
        console.out(json.dumps(dump_to_json(step)), highlight=False)
    else:
        print_dump(step, console)
    return 0


def _settings(options: Namespace, returned: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `explain`: flags, and what the user's function returns where there is no flag.

    Raises:
        ExplainingError: the function returns a setting that is none, or there is no mesh or cluster.
    """
    known = [name for name in inspect.signature(explain).parameters if name not in _NOT_SETTINGS]
    for name in returned:
        if name not in known:
            raise ExplainingError(f"{options.model} returns a setting {name!r}", one_of(known, name))
    names = ("mesh", "cluster", "microbatches", "schedule", "stages", "layouts")
    flags = {name: value for name in names if (value := getattr(options, name)) is not None}
    settings = {**returned, **flags, **given_limits(options)}
    settings["options"] = {**(returned.get("options") or {}), **dict(options.option)}
    for name, example in (("mesh", '--mesh "pipe=2 x=4"'), ("cluster", "--cluster dgx-h100")):
        if name not in settings:
            raise ExplainingError(
                f"expected a {name}, found none", f"give {example}, or return {{{name!r}: ...}} beside model and batch"
            )
    return settings


def _stages(text: str) -> int | list[str]:
    """A number, or comma-separated paths of modules."""
    return count(text) if text.isdecimal() else text.split(",")


def _layouts(text: str) -> Any:
    """ "plan", "search", or a JSON object of hints.

    Raises ValueError.
    """
    if text in ("plan", "search"):
        return text
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    return found


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, where VALUE is JSON or a plain word.

    Raises ValueError.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
