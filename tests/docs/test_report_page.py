"""docs/report.md tells of the parts that the page has, and its pictures are there."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "report.md").read_text(encoding="utf-8")


def test_every_part_of_the_page_is_told_of() -> None:
    page = (files("fxpar.report.page") / "page.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert len(headings) == 10
    assert [heading for heading in headings if f"**{heading}**" not in TEXT and f"## {heading}" not in TEXT] == []


def test_pictures_and_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links and [link for link in links if not (DOCS / link).exists()] == []
