"""Headless Chromium for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def opened(path: Path, width: int = 1280, height: int = 900) -> Iterator[Page]:
    """The page in a browser of its own, which is offline."""
    chromium = next(filter(None, map(shutil.which, _NAMES)), None)
    if chromium is None:
        pytest.skip(f"needs a browser: found none of {', '.join(_NAMES)}")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive a browser")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
        page = context.new_page()
        page.goto(path.absolute().as_uri())
        yield page
        browser.close()
