"""Take the pictures of docs/report.md: `python docs/make_screenshots.py`, with playwright and Chromium.

Four processes train the example's GPT, as two hosts, and a browser opens the report of their dump.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Page

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
EXAMPLES = DOCS.parent / "examples"
WIDTH, MARGIN = 1280, 12
RANKS, STEPS, BATCH, MICROBATCHES = 4, 3, 16, 8


def main() -> None:
    """Train, and photograph the report."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "gpt"
        launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)
        subprocess.run([sys.executable, *launcher, __file__, str(folder)], check=True)
        IMAGES.mkdir(exist_ok=True)
        photograph(folder / "report.html")


def train(folder: Path) -> None:
    """What a rank does: some steps that are recorded, of which the last is shown."""
    os.environ["FXPAR_HOST"] = f"host {int(os.environ['RANK']) * 2 // RANKS}"
    sys.path.append(str(EXAMPLES))

    import torch
    from gpt import Config
    from train_gpt import HINTS, make_batches, make_model

    import fxpar

    torch.set_num_threads(1)
    mesh = fxpar.init_mesh(pipe=2, x=2)
    config = Config(layers=6, hidden=256)
    batches = make_batches(STEPS + 1, BATCH, config.context)
    model = make_model(config)
    fxpar.distribute(model, mesh, layouts=HINTS, microbatches=MICROBATCHES, example_inputs=batches[0])
    options = {"dump": folder, "timeline": folder / "measured", "lowering": "aten", "profile": True}
    step = torch.compile(model, backend="fxpar", options=options)
    for tokens, targets in batches:
        step(tokens, targets).backward()


def photograph(report: Path) -> None:
    """Its top, and its timeline."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        save(page, "header", "#limits", IMAGES / "report.png")
        save(page, "#timeline", "#timeline", IMAGES / "report-timeline.png")
        browser.close()


def save(page: Page, first: str, last: str, path: Path) -> None:
    """The part of the page from one element to another."""
    begin, end = page.locator(first).bounding_box(), page.locator(last).bounding_box()
    assert begin is not None and end is not None, f"the page lacks {first} or {last}"
    top, bottom = begin["y"] - MARGIN, end["y"] + end["height"] + MARGIN
    clip: FloatRect = {"x": 0.0, "y": max(0.0, top), "width": float(WIDTH), "height": bottom - max(0.0, top)}
    page.screenshot(path=path, full_page=True, clip=clip)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        main()
