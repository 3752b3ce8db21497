"""docs/architecture.md names nothing that is not there, and its figure is what the script draws."""

from __future__ import annotations

import pkgutil
import re
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REMEDY = "was it renamed or removed? Change"


def page() -> str:
    """The page as it is in the repository."""
    return (DOCS / "architecture.md").read_text(encoding="utf-8")


def quoted() -> list[str]:
    """What stands in backticks on the page, each once."""
    return list(dict.fromkeys(re.findall(r"`([^`\n]+)`", page())))


def unresolved(names: list[str]) -> list[str]:
    """Those that are neither a module nor an attribute of one."""
    return [name for name in names if not _resolves(name)]


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_name_on_the_page_exists() -> None:
    found = [match[0] for text in quoted() if (match := re.match(r"fxpar(\.\w+)+", text))]
    assert found, "the page quotes names of fxpar"
    assert not (missing := unresolved(found)), f"{missing}: {REMEDY} docs/architecture.md"


def test_every_path_and_link_on_the_page_exists() -> None:
    paths = [ROOT / text for text in quoted() if "/" in text]
    links = [DOCS / link for link in re.findall(r"\]\(([^)#:]+)\)", page())]
    assert paths and links, "the page quotes paths, and has links"
    missing = [str(path) for path in (*paths, *links) if not path.exists()]
    assert not missing, f"{missing}: {REMEDY} docs/architecture.md"


def test_every_name_in_the_figure_exists() -> None:
    figure = tomllib.loads((DOCS / "architecture.toml").read_text(encoding="utf-8"))
    boxes = [box for panel in figure["panels"] for box in panel["boxes"]]
    found = [name for box in boxes for name in (*box["functions"], box.get("value", "fxpar"))]
    found += [crossing["value"] for crossing in figure["crossings"]]
    assert not (missing := unresolved(found)), f"{missing}: {REMEDY} docs/architecture.toml"


def test_the_committed_figure_is_what_the_script_draws() -> None:
    script = runpy.run_path(str(DOCS / "draw_architecture.py"))
    drawn = script["draw"](script["read_figure"]())
    committed = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    assert committed == drawn, "docs/architecture.svg is out of date: run `python docs/draw_architecture.py`"
