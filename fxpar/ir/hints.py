"""Sharding hints: patterns over parameter names and module paths, resolved against a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from fxpar.errors import HintNotFoundError
from fxpar.ir.markers import check_spec

OUTPUT_SUFFIX = ":out"
"""A pattern with this suffix hints the output of modules, not parameters."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A fused dim of `groups` equal parts, each sharded over `axis` by itself: q, k and v in one weight, say."""

    groups: int
    axis: str


Entry: TypeAlias = str | Grouped | None
Spec: TypeAlias = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Hints:
    """Resolved hints: a spec per hinted parameter (fully qualified name) and per hinted module output (path)."""

    parameters: Mapping[str, Spec]
    outputs: Mapping[str, Spec]


def resolve_hints(
    layouts: Mapping[str, Sequence[Entry]], shapes: Mapping[str, Sequence[int]], modules: Sequence[str]
) -> Hints:
    """Match the user's patterns with parameters (`shapes`: name -> logical shape) and module paths.

    `*` matches any text, dots included; if several patterns match a name, the last wins.

    Raises:
        HintNotFoundError: a pattern matches nothing.
        InvalidHintError: a hint does not fit its tensor (see `fxpar.shard`).
    """
    parameters: dict[str, Spec] = {}
    outputs: dict[str, Spec] = {}
    for pattern, spec in layouts.items():
        is_output = pattern.endswith(OUTPUT_SUFFIX)
        candidates = modules if is_output else list(shapes)
        found = [name for name in candidates if fnmatchcase(name, pattern.removesuffix(OUTPUT_SUFFIX))]
        if not found:
            suffix = OUTPUT_SUFFIX if is_output else ""
            raise HintNotFoundError(pattern, [name + suffix for name in candidates])
        for name in found:
            if not is_output:
                check_spec(f"parameter {name!r}", spec, len(shapes[name]))
            (outputs if is_output else parameters)[name] = tuple(spec)
    return Hints(parameters, outputs)
