"""Draw readme_picture.svg from the dump of the README's program on four ranks: `python docs/draw_readme_picture.py`.

Above, an MLP of the model as it was captured, and as two ranks compute it; below, the simulated timeline of the step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from fxpar.schedule import Costs, Timeline
from fxpar.simulate.predict import predict_named
from fxpar.simulate.sources import RecordedCosts

ROOT = Path(__file__).parents[1]
DRAWING = ROOT / "docs" / "readme_picture.svg"

MODULE, SCHEDULE = "blocks.0.mlp", "eager-1f1b"
RANKS = (0, 1)
"""Those that share the first stage."""
UNSEEN = ("param", "reshape", "t", "wait_tensor")
"""Ops that the picture leaves out: views, and what every collective is followed by."""

OP = re.compile(r" {4}(\w+): \w+\[(.*?)\] = ([\w.]+)\((.*)\)(?:  # (.*))?$")
ARGUMENT = re.compile(r" {4}(\w+): \w+\[(.*?)\],(?:  # .*)?$")

# In pixels: around everything and between rows, of the labels of rows, and of the boxes and the arrows between them.
MARGIN, LABEL, BOX, ARROW, BOX_HEIGHT, ROW = 24, 86, 142, 22, 66, 84
WIDTH = 2 * MARGIN + LABEL + 6 * BOX + 5 * ARROW
LANE = 30
INK, GREY, RED, PALE = "#1f2933", "#52606d", "#9c4221", "#d9e2ec"
COLOURS = {"F": "#a9cdf0", "B": "#f3c9a5"}
STYLE = f"""
text {{ font: 12px system-ui, Helvetica, Arial, sans-serif; fill: {GREY} }}
.title {{ font-size: 15px; font-weight: bold; fill: {INK} }}
.op {{ font: bold 13px ui-monospace, Menlo, Consolas, monospace; fill: {INK} }}
.shape {{ font: 11px ui-monospace, Menlo, Consolas, monospace; fill: {GREY} }}
.layout {{ font: 11px ui-monospace, Menlo, Consolas, monospace; fill: {RED} }}
.bar {{ fill: {INK}; text-anchor: middle }}
"""


@dataclass(frozen=True, slots=True)
class Op:
    """A line of a dump: the op, the shape of its result, the weight or bias that it reads, and the comment."""

    name: str
    shape: str
    parameter: str
    comment: str

    @property
    def is_collective(self) -> bool:
        return "bytes" in self.comment


def ops_of(dump: str) -> Iterator[Op]:
    """The ops of `MODULE`, in order."""
    lines = dump.splitlines()
    parameters = {match[1]: match[1] for line in lines if (match := ARGUMENT.match(line))}
    inside = False
    for line in lines:
        if line.startswith("    # "):
            inside = f"{line[6:]}.".startswith(f"{MODULE}.")
        if not inside or not (match := OP.match(line)):
            continue
        result, shape, target, arguments, comment = match.groups(default="")
        name = target.split(".")[1 if target.startswith("aten.") else -1]
        read = next((parameters[word] for word in re.findall(r"\w+", arguments) if word in parameters), "")
        if name == "param":
            parameters[result] = arguments.split("'")[-2]
        elif name == "t":
            parameters[result] = read
        if name not in UNSEEN:
            kind = re.split(r"[._]", read)
            yield Op(name, f"[{shape}]", ".".join(kind[-2:]) if read else "", comment)


def draw(dump: Path) -> str:
    """The picture of a dump, as an SVG document."""
    captured = list(ops_of((dump / "rank0" / "01_capture.py").read_text(encoding="utf-8")))
    by_rank = [list(ops_of(_forward_of(dump, rank))) for rank in RANKS]
    costs = Costs.load(dump)
    assert costs.num_microbatches is not None, "a compiled step's costs have it"
    timeline = predict_named(SCHEDULE, RecordedCosts(costs), costs.num_microbatches).timeline.from_start()
    after, below = 96 + ROW, 132 + (1 + len(RANKS)) * ROW
    height = below + 40 + LANE * len(timeline.ranks) + 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}">',
            "<title>An MLP as it was captured, as two ranks compute it, and the timeline of a step</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="12" fill="white"/>',
            _text(MARGIN, 34, f"{MODULE} as the model computes it, for one microbatch", "title"),
            *_row(52, "one process", captured),
            _text(MARGIN, after - 14, "and as the two ranks of the first stage compute it", "title"),
            *_row(after, "rank 0", by_rank[0]),
            *_row(after + ROW, "rank 1", by_rank[1]),
            *_across_ranks(after, by_rank[0]),
            *_timeline(below, timeline, costs.num_microbatches),
            "</svg>\n",
        ]
    )


def _forward_of(dump: Path, rank: int) -> str:
    (path,) = (dump / f"rank{rank}").glob("*_partition_forward.stage0.py")
    return path.read_text(encoding="utf-8")


def _row(top: int, label: str, ops: Sequence[Op]) -> Iterator[str]:
    """A chain of boxes; collectives are drawn over all rows."""
    yield _text(MARGIN, top + BOX_HEIGHT / 2 + 4, label)
    for number, op in enumerate(ops):
        x = _left(number)
        if number:
            yield _arrow(x - ARROW, top + BOX_HEIGHT / 2)
        if not op.is_collective:
            yield _box(x, top, BOX_HEIGHT, "#f5f7fa", "#9fb3c8")
            yield from _lines(x, top, op)


def _across_ranks(top: int, ops: Sequence[Op]) -> Iterator[str]:
    for number, op in enumerate(ops):
        if op.is_collective:
            x, height = _left(number), ROW * (len(RANKS) - 1) + BOX_HEIGHT
            yield _box(x, top, height, "#fdf3ec", RED)
            yield from _lines(x, top + (height - BOX_HEIGHT) / 2, op)


def _lines(x: float, top: float, op: Op) -> Iterator[str]:
    about = op.comment.split(", ") if op.is_collective else [op.comment]
    written = [(op.name, "op"), (op.shape, "shape"), (op.parameter, "shape"), *((text, "layout") for text in about)]
    for number, (text, kind) in enumerate(line for line in written if line[0]):
        yield _text(x + 9, top + 18 + 13 * number, text, kind)


def _timeline(top: float, timeline: Timeline, num_microbatches: int) -> Iterator[str]:
    """A lane for the ranks of each stage, with a bar for each computation."""
    makespan = timeline.makespan_us
    title = f"A step of {num_microbatches} microbatches by {SCHEDULE}, simulated: {makespan / 1000:.1f} ms"
    yield _text(MARGIN, top, title, "title")
    scale = (WIDTH - 2 * MARGIN - LABEL) / makespan
    for rank, lane, spans in timeline.tracks():
        if lane != "compute":
            continue
        y = top + 16 + LANE * rank
        yield _text(MARGIN, y + 16, f"ranks {rank * len(RANKS)}-{rank * len(RANKS) + 1}")
        for span in spans:
            x, width = MARGIN + LABEL + span.begin_us * scale, (span.end_us - span.begin_us) * scale
            yield _box(x, y, LANE - 6, COLOURS[span.kind], "white", width)
            yield _text(x + width / 2, y + 16, span.name, "bar")
    legend = "F: forward, B: backward; before it the stage, behind it the microbatch"
    yield _text(MARGIN + LABEL, top + 36 + LANE * len(timeline.ranks), legend)


def _left(number: int) -> int:
    return MARGIN + LABEL + number * (BOX + ARROW)


def _box(x: float, y: float, height: float, fill: str, stroke: str, width: float = BOX) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} rx="5" fill="{fill}" stroke="{stroke}"/>'


def _arrow(x: float, y: float) -> str:
    line = f"M {x + 3} {y} h {ARROW - 8} m -5 -4 l 5 4 l -5 4"
    return f'<path d="{line}" fill="none" stroke="{GREY}" stroke-width="1.4"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(text)}</text>'


def main() -> None:
    """Run the program, and write the drawing of its dump."""
    sys.path.insert(0, str(ROOT))  # for what runs the program: tests do, too
    from tests.support.doc_blocks import run_readme

    with TemporaryDirectory() as folder:
        run_readme(Path(folder))
        DRAWING.write_text(draw(Path(folder) / "dump"), encoding="utf-8")


if __name__ == "__main__":
    main()
