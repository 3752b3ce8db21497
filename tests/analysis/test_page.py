"""The page of a report in a browser: it opens without errors and without a network, and answers mouse and keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from fxpar.analysis.dumped_step import read_dump
from fxpar.analysis.limits.find_limits import find_limits
from fxpar.cli import main
from fxpar.hardware.cluster import cluster_named
from fxpar.schedule import Timeline
from tests.support.browser import opened
from tests.support.imagined_dump import Imagined, dump_imagined
from tests.support.small_models import GPT

if TYPE_CHECKING:
    from playwright.sync_api import Page

CLUSTER = replace(cluster_named("laptop"), ranks_per_host=2)
SLOWER = 1.5
"""By how much the measured step takes longer than predicted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with its report: a GPT on two hosts, and a step that was measured."""
    folder = tmp_path_factory.mktemp("dumps") / "a < b"
    with torch.device("meta"):
        model, tokens = GPT(), torch.zeros(8, 12, dtype=torch.int64)
    hints = {"blocks.*.up.weight": ("x", None), "blocks.*.down.weight": (None, "x")}
    how = Imagined({"pipe": 2, "x": 2}, CLUSTER, 4, "1f1b", hints)
    dump_imagined(model, (tokens, tokens), how, folder, texts=True)
    spans = [
        replace(span, begin_us=SLOWER * span.begin_us, end_us=SLOWER * span.end_us)
        for span in read_dump(folder).simulated.spans
    ]
    (folder / "measured").mkdir()
    Timeline(tuple(spans)).save(folder / "measured" / "timeline.rank0.json")
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Page]:
    with opened(folder / "report.html") as page:
        page.set_default_timeout(20_000)
        yield page


@pytest.fixture(autouse=True)
def _as_opened(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})
    page.mouse.move(0, 0)
    page.locator("#zoom-reset").click()
    page.keyboard.press("Escape")


def rows(page: Page, table: str) -> list[list[str]]:
    """The texts of a table."""
    script = "body => [...body.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    return page.locator(f"{table} tbody").evaluate(script)


def visible_us(page: Page) -> tuple[float, float]:
    begin, end = page.evaluate("[timelineView.begin, timelineView.end]")
    return begin, end


def hover(page: Page, row: int, span: int) -> str:
    """Point at the middle of a bar of the timeline; returns what is shown there."""
    page.locator("#timeline-canvas").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([row, span]) => {
          const found = timelineView.rows[row], [begin, end] = found.spans[span];
          const box = timelineView.canvas.getBoundingClientRect();
          return [box.left + timelineView.x((begin + end) / 2), box.top + found.y + 10];
        }""",
        [row, span],
    )
    page.mouse.move(x, y)
    return page.locator("#tooltip").inner_text()


def test_it_opens_without_errors_and_asks_for_nothing(folder: Path, page: Page) -> None:
    problems: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.title() == "fxpar: a < b"
    page.locator("#passes").scroll_into_view_if_needed()
    page.wait_for_selector("#diff table")
    assert problems == []
    assert [url for url in asked if not url.startswith("data:")] == [(folder / "report.html").as_uri()]


def test_the_top_has_the_figures_and_what_limits_the_step(folder: Path, page: Page) -> None:
    step = read_dump(folder)
    assert page.locator("#configuration").inner_text().startswith("4 ranks on 2 hosts of laptop: pipe=2 × x=2; 1f1b")
    limits = find_limits(step)
    assert len(limits) >= 2
    shown = page.locator("#limit-list li")
    assert shown.count() == len(limits)
    for place, limit in enumerate(limits):
        text = shown.nth(place).inner_text()
        assert limit.title in text and limit.finding.replace("`", "") in text and limit.advice.replace("`", "") in text
    predicted, measured = page.locator(".figure b").all_inner_texts()[:2]
    assert float(predicted.split()[0]) == pytest.approx(step.step_us / 1e3, rel=0.01)
    assert float(measured.split()[0]) == pytest.approx(SLOWER * step.simulated.makespan_us / 1e3, rel=0.01)
    assert page.locator(".rank").count() == 4
    assert page.locator(".stages li").count() == 2


def test_pointing_at_a_bar_shows_its_details(page: Page) -> None:
    text = hover(page, 0, 0)
    assert text.startswith("rank 0 simulated: 0F0\nforward of stage 0, microbatch 0\n")
    assert re.search(r"[\d.]+ ms, from 0 us to [\d.]+ ms", text)
    assert "on the critical path" in text
    waited = re.search(r"waits for collectives: ([\d.]+) ms over x", text)
    assert waited and float(waited[1]) > 0
    labels = page.evaluate("timelineView.rows.map(row => row.label)")
    assert hover(page, labels.index("rank 0 measured"), 0).startswith("rank 0 measured: 0F0")
    waits = page.evaluate("timelineView.rows[0].spans.findIndex(span => span[3] === 'gradient' && span[7] < span[1])")
    assert "exposed communication: " in hover(page, 0, waits)
    page.mouse.move(0, 0)
    assert page.locator("#tooltip").is_hidden()


def test_the_timeline_zooms_and_pans(page: Page) -> None:
    begin, end = visible_us(page)
    assert begin == 0
    page.get_by_role("button", name="Zoom in").click()
    near_begin, near_end = visible_us(page)
    assert near_end - near_begin == pytest.approx((end - begin) / 2)
    assert page.locator("#range").inner_text() != f"0 us to {end}"
    hover(page, 0, page.evaluate("timelineView.rows[0].spans.findIndex(span => span[0] > timelineView.begin)"))
    page.mouse.down()
    box = page.locator("#timeline-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"], box["y"] + 60, steps=3)
    page.mouse.up()
    assert visible_us(page)[0] < near_begin
    hover(page, 0, 0)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("width => timelineView.end - timelineView.begin < width * 0.9", arg=near_end - near_begin)
    page.get_by_role("button", name="Whole step").click()
    assert visible_us(page) == (0, end)


def test_the_keyboard_goes_from_action_to_action(page: Page) -> None:
    canvas = page.locator("#timeline-canvas")
    canvas.focus()
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
        said.append(page.locator("#timeline-live").inner_text())
    assert said[0].startswith("rank 0 simulated: 0F0") and said[1].startswith("rank 0 simulated: 0F1")
    assert said[2].startswith("messages: ")
    whole = visible_us(page)
    page.keyboard.press("Enter")
    begin, end = visible_us(page)
    assert end - begin < (whole[1] - whole[0]) / 2
    page.keyboard.press("0")
    assert visible_us(page) == whole
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") != "timeline-canvas", "the timeline is no trap"


def test_every_control_has_a_name(page: Page) -> None:
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, canvas, svg, [role=region]")].filter(element =>
          !element.getAttribute("aria-label") && !element.textContent.trim() && !element.closest("label"))
          .map(element => element.outerHTML.slice(0, 100))"""
    )
    assert nameless == []
    assert page.locator("svg:not([role=img])").count() == 0


def test_tables_sort_by_their_headers(page: Page) -> None:
    header = page.locator("#layout-table th", has_text="bytes")
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    largest = rows(page, "#layout-table")[0][6]
    assert largest == f"{96 * 24 * 4 / 1e3:.3g} kB"
    header.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    assert rows(page, "#layout-table")[0][6] == "4 B", "the loss"
    names = page.locator("#layout-table th", has_text="name")
    names.get_by_role("button").click()
    found = [row[0] for row in rows(page, "#layout-table")]
    assert found.index("blocks.0.up.weight") < found.index("tokens.weight")


def test_tables_are_searched(page: Page) -> None:
    search = page.get_by_role("searchbox", name="Search Layouts by module")
    everything = len(rows(page, "#layout-table"))
    search.fill("parameter UP.weight")
    found = rows(page, "#layout-table")
    assert [row[0] for row in found] == ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert found[0][5] == "[2@x*48, 24]"
    search.fill("")
    assert len(rows(page, "#layout-table")) == everything > 20


def test_communication_is_shown_by_axis_and_kind(page: Page) -> None:
    found = rows(page, "#traffic-table")
    assert {("x", "all_reduce"), ("pipe", "values between stages")} <= {(row[0], row[1]) for row in found}
    verdicts = [row[-1] for row in rows(page, "#collective-table")]
    assert any(verdict.startswith(("left", "fused")) for verdict in verdicts)
    assert {row[4] for row in rows(page, "#replicated-table")} == {"x"}


def test_memory_is_shown_by_use_for_every_rank(folder: Path, page: Page) -> None:
    memory = read_dump(folder).memory
    peaks = [max(sum(each.running.values()) for each in actions) for actions in memory]
    options = page.locator("#memory-rank option").all_inner_texts()
    assert [option.split(":")[0] for option in options] == ["0", "1"]
    assert float(options[0].split()[2]) == pytest.approx(peaks[0] / 1e3, rel=0.01)
    page.locator("#memory-rank").select_option("1")
    page.locator("#memory-picture svg").hover()
    text = page.locator("#tooltip").inner_text()
    assert re.match(r"(in|after) 1[FB]\d", text) and "weights: " in text and "optimizer: " in text


def test_transfers_are_drawn(page: Page) -> None:
    options = page.locator("#transfer-choice option").all_inner_texts()
    assert any("value of edge" in option for option in options) and any("gradient of" in option for option in options)
    picture = page.locator("#transfer-picture svg").first
    assert picture.locator(".link.between").count() >= 1
    assert "host 0 sends" in page.locator("#transfer-picture svg").last.text_content()
    picture.locator(".link.between").first.dispatch_event("mousemove")
    assert re.match(r"rank [01] → rank [23]: .*, over the network", page.locator("#tooltip").inner_text())


def test_graphs_stand_side_by_side_with_their_differences(folder: Path, page: Page) -> None:
    page.locator("#passes").scroll_into_view_if_needed()
    page.wait_for_selector("#diff .added")
    assert page.locator("#before-choice").input_value() == "propagate_layouts"
    assert page.locator("#after-choice").input_value() == "insert_collectives"
    assert any("all_reduce" in line for line in page.locator("#diff .added").all_inner_texts())
    page.locator("#graph-choice").select_option("stage 1")
    page.locator("#after-choice").select_option("overlap_collectives_backward")
    page.wait_for_function("document.getElementById('before-choice').value.endsWith('_backward')")
    page.locator("#before-choice").select_option("(nothing)")
    page.wait_for_function("document.querySelectorAll('#diff .removed').length === 0")
    (dumped,) = folder.glob("rank2/*_overlap_collectives_backward.stage1.py")
    shown = page.locator("#diff td:last-child").evaluate_all("cells => cells.map(cell => cell.textContent)")
    assert shown == dumped.read_text(encoding="utf-8").splitlines()


def test_equal_lines_are_folded_until_someone_asks(page: Page) -> None:
    page.locator("#passes").scroll_into_view_if_needed()
    page.locator("#graph-choice").select_option("stage 0")
    page.locator("#before-choice").select_option("insert_collectives")
    fold = page.locator("#diff .equal button")
    page.wait_for_function("document.querySelectorAll('#diff .equal').length === 1")
    before = page.locator("#diff tr").count()
    fold.focus()
    page.keyboard.press("Enter")
    assert fold.count() == 0 and page.locator("#diff tr").count() > before + 10


def test_dark_mode_follows_the_system(page: Page) -> None:
    def colours() -> tuple[str, str]:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bar = page.evaluate(
            "timelineView.canvas.getContext('2d').getImageData(timelineView.width / 2, 0, 1, 60).data.join()"
        )
        return background, bar

    light = colours()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("getComputedStyle(document.body).backgroundColor !== 'rgb(247, 248, 249)'")
    dark = colours()
    assert light[0] != dark[0] and light[1] != dark[1], "the canvas is drawn anew, too"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page: Page, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme)
    worst = page.evaluate(
        """() => {
          const luminance = (name) => {
            const value = parseInt(style(name).slice(1), 16);
            const [r, g, b] = [value >> 16, (value >> 8) & 255, value & 255].map((part) => part / 255)
              .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const contrast = (one, other) => {
            const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
            return (light + 0.05) / (dark + 0.05);
          };
          const pairs = [["--text", "--surface"], ["--muted", "--surface"], ["--muted", "--raised"],
            ["--muted", "--background"], ["--accent", "--surface"], ["--text", "--added"], ["--text", "--removed"],
            ["--on-bar", "--forward"], ["--on-bar", "--backward"], ["--on-bar", "--message"]];
          return Math.min(...pairs.map(([one, other]) => contrast(one, other)));
        }"""
    )
    assert worst >= 4.5, "as WCAG 2 asks of text"


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function("width => timelineView.width < width", arg=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
