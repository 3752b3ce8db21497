"""The hints for a model: those that its authors ship, and over them those that the user gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import nn

from fxpar.errors import HintNotFoundError, InvalidOptionError, NoShippedPlanError
from fxpar.ir.hints import Entry, Grouped, Hints, Spec, resolve_hints
from fxpar.ir.parallel_styles import Style, hint_of_style, is_style
from fxpar.model.logical_parameters import LogicalParameter
from fxpar.model.shipped_plan import PlanEntry, ShippedPlan, read_shipped_plan
from fxpar.report.text_table import text_of
from fxpar.world.mesh import Mesh

Layouts: TypeAlias = Mapping[str, Sequence[Entry] | Style] | Literal["plan", "search"] | None
"""What users give to `distribute` as `layouts`."""


@dataclass(frozen=True, slots=True)
class ReadEntry:
    """What an entry of a shipped plan became: a `hint`, as text, for so many parameters, and whether it is used."""

    entry: PlanEntry
    hint: str
    num_parameters: int
    verdict: str


@dataclass(frozen=True, slots=True)
class ResolvedLayouts:
    """The hints, and the shipped plan that some are from; None if none was read."""

    hints: Hints
    shipped: ShippedPlan | None

    @property
    def entries(self) -> list[ReadEntry]:
        """What each entry of the shipped plan became."""
        if self.shipped is None:
            return []
        by_entry: dict[tuple[PlanEntry, Spec], list[str]] = {}
        for name, entry in self.shipped.sources.items():
            by_entry.setdefault((entry, self.shipped.hints[name]), []).append(name)
        found = []
        for (entry, hint), names in by_entry.items():
            kept = sum(self.hints.parameters[name] == hint for name in names)
            verdict = "used" if kept == len(names) else f"overridden by `layouts` for {len(names) - kept}"
            found.append(ReadEntry(entry, _shown(hint), len(names), verdict))
        found += [ReadEntry(entry, "-", 0, reason) for entry, reason in self.shipped.without_effect.items()]
        return found + [
            ReadEntry(entry, "-", 0, "stages are balanced, or as `stages` says") for entry in self.shipped.cuts
        ]

    def describe_plan(self) -> str:
        """What each entry of the shipped plan became, one per line; "" if none was read."""
        if self.shipped is None:
            return ""
        from rich.table import Table  # takes long to import

        table = Table("key", "style", "from", "hint", "parameters", "verdict", box=None, pad_edge=False)
        for read in self.entries:
            entry = read.entry
            table.add_row(entry.key, entry.style, entry.origin, read.hint, str(read.num_parameters), read.verdict)
        return text_of(table)


def resolve_layouts(
    layouts: Layouts, model: nn.Module, parameters: Mapping[str, LogicalParameter], mesh: Mesh
) -> ResolvedLayouts:
    """The hints for `model`: of its shipped plan, if the mesh has an x axis, and over them those in `layouts`.

    Raises:
        HintNotFoundError, InvalidHintError: as `resolve_hints`.
        UnknownStyleError: nothing here knows a style of a plan or of `layouts`.
        NoShippedPlanError: `layouts` is "plan", and the model ships none.
        InvalidOptionError: `layouts` is another text.
    """
    if isinstance(layouts, str) and layouts not in ("plan", "search"):
        raise InvalidOptionError("layouts", layouts, 'a mapping, "plan" or "search"')
    wants_plan = layouts == "plan" or (layouts != "search" and mesh.x > 1)
    shipped = read_shipped_plan(model, parameters, mesh.x) if wants_plan else None
    if layouts == "plan" and (shipped is None or not shipped.hints):
        raise NoShippedPlanError(type(model).__name__, [] if shipped is None else list(shipped.without_effect.values()))
    given = dict(_without_styles(_mapping(layouts), model, parameters))
    planned = {} if shipped is None else {name: spec for name, spec in shipped.hints.items() if name not in given}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    paths = [path for path, _ in model.named_modules() if path]
    return ResolvedLayouts(resolve_hints({**planned, **given}, shapes, paths), shipped)


def given_patterns(layouts: Layouts) -> Collection[str]:
    """The patterns of the user's own hints."""
    return _mapping(layouts).keys()


def _mapping(layouts: Layouts) -> Mapping[str, Sequence[Entry] | Style]:
    return {} if layouts is None or isinstance(layouts, str) else layouts


def _without_styles(
    layouts: Mapping[str, Sequence[Entry] | Style], model: nn.Module, parameters: Mapping[str, LogicalParameter]
) -> Iterator[tuple[str, Sequence[Entry]]]:
    """The hints in order, with those for parameters in place of a style for modules or parameters."""
    for pattern, hint in layouts.items():
        if not is_style(hint):
            assert isinstance(hint, Sequence), f"{hint} is a hint"
            yield pattern, hint
            continue
        found = [name for name in parameters if _is_meant(pattern, name)]
        if not found:
            paths = [path for path, module in model.named_modules() if next(module.parameters(False), None) is not None]
            raise HintNotFoundError(pattern, [*paths, *parameters])
        for name in found:
            spec = hint_of_style(hint, parameters[name].styled, f"{pattern!r} of `layouts`")
            if spec is not None:
                yield name, spec


def _is_meant(pattern: str, parameter: str) -> bool:
    """Whether the pattern matches a parameter or the module that holds it."""
    return fnmatchcase(parameter, pattern) or fnmatchcase(parameter.rpartition(".")[0], pattern)


def _shown(hint: Spec) -> str:
    entries = (f"{entry.groups} x {entry.axis}" if isinstance(entry, Grouped) else str(entry or "-") for entry in hint)
    return f"({', '.join(entries)})"
