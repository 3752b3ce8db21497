"""docs/options.md is what its script makes of the source, and leaves nothing out."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from fxpar import distribute, environment, init_mesh
from fxpar.config import Options

DOCS = Path(__file__).parents[2] / "docs"
OUT_OF_DATE = "docs/options.md is out of date: run `python docs/make_options.py`"


def committed_page() -> str:
    """The page as it is in the repository."""
    return (DOCS / "options.md").read_text(encoding="utf-8")


def section_of(page: str, title: str) -> str:
    """What stands under the heading `title`."""
    _, _, behind = page.partition(f"\n## {title}\n")
    return behind.partition("\n## ")[0]


def test_the_committed_page_is_what_the_script_makes() -> None:
    script = runpy.run_path(str(DOCS / "make_options.py"))
    assert committed_page() == script["options_page"](), OUT_OF_DATE


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("fxpar.init_mesh", inspect.signature(init_mesh).parameters),
        ("fxpar.distribute", inspect.signature(distribute).parameters),
        ("torch.compile", [field.name for field in fields(Options)]),
        ("Environment variables", re.findall(r'environ\.(?:get|setdefault)\("(\w+)"', inspect.getsource(environment))),
    ],
)
def test_every_option_has_a_row(title: str, names: Iterable[str]) -> None:
    assert re.findall(r"^\| `(\w+)` \|", section_of(committed_page(), title), re.MULTILINE) == list(names), OUT_OF_DATE
