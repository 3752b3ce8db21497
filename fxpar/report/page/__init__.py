"""The page of a report: one HTML file with its style, its script and its data, which loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any


def make_page(title: str, data: Mapping[str, Any]) -> str:
    """The page that shows `data`, which JSON can have; page.js says what it must be."""
    # JSON in a script element ends at the first "</script", wherever that is.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": escape(title), "STYLE": _read("page.css"), "DATA": text, "SCRIPT": _read("page.js")}
    before, *rest = _read("page.html").split("{{")
    return before + "".join(parts[name] + after for name, _, after in (part.partition("}}") for part in rest))


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
