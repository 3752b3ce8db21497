"""The site builds, and every link of its pages and of the README leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_blocks import README, ROOT, pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with --strict: a link to a page, a heading or a file that is not there is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built_and_none_loads_anything_from_elsewhere(site: Path) -> None:
    built = [site / page.stem / "index.html" for page in pages() if page.name not in ("README.md", "index.md")]
    for page in (site / "index.html", *built):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\"\s>]+)", page.read_text())
        assert not loaded, f"{page}: {loaded}"


def test_links_to_sources_lead_to_copies_of_them(site: Path) -> None:
    assert (site / "examples" / "train_gpt.py").read_text() == (ROOT / "examples" / "train_gpt.py").read_text()
    assert 'href="examples/train_gpt.py"' in (site / "index.html").read_text()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[one](two.md) and [code](../no/such.py)\n")
    settings, _, _ = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    (tmp_path / "mkdocs.yml").write_text(
        settings.replace("docs/link_to_sources.py", str(ROOT / "docs/link_to_sources.py"))
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode != 0
    assert "two.md" in built.stderr and "no/such.py" in built.stderr


def test_the_readme_has_the_two_commands() -> None:
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in README.read_text().splitlines()}


def test_links_of_the_readme_exist_and_it_has_every_page() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert not [link for link in links if not (ROOT / link).exists()]
    missing = {f"docs/{page.name}" for page in pages()} - {*links, "docs/README.md"}
    assert not missing, f"the README does not name {missing}"
