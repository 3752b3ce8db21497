"""Hooks of mkdocs: pages link to files of the repository, as `../examples/gpt.py`, and the site has copies of these."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK_UP = re.compile(r"\]\(\.\./([^)#\s]+)")
LINK_DOWN = re.compile(r"\]\(docs/")
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages that are at the root of the repository; their links go down, into docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to; a link to one that is not there stays broken, and is found."""
    texts = [page.content_string for page in files.documentation_pages()]
    linked = {match[1] for text in texts for match in LINK_UP.finditer(text)}
    for name in sorted(linked.union(PAGES)):
        if (ROOT / name).is_file() and files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are on the site, where docs/ is the root."""
    return LINK_DOWN.sub("](", LINK_UP.sub(r"](\1", markdown))
