"""The page of a report: one HTML file with its style, its scripts and its data, which loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

_SCRIPTS = (
    "elements",
    "table",
    "limits",
    "mesh",
    "timeline",
    "memory",
    "rows",
    "transfers",
    "diff",
    "graphs",
    "main",
)
"""In the order in which they run; they share one scope."""


def make_page(title: str, data: Mapping[str, Any]) -> str:
    """The page that shows `data`, which JSON can have: what `fxpar.analysis.page_data` makes, and graphs."""
    # JSON in a script element ends at the first "</script", wherever that is.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    scripts = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    parts = {"TITLE": escape(title), "STYLE": _read("page.css"), "DATA": text, "SCRIPT": scripts}
    before, *rest = _read("page.html").split("{{")
    return before + "".join(parts[name] + after for name, _, after in (part.partition("}}") for part in rest))


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
