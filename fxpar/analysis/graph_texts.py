"""The graphs of a dump: the text that each pass left of each stage, and of which pass it is the result."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = re.compile(r"(?P<number>\d\d)_(?P<name>\w+?)(\.stage(?P<stage>\d+))?\.py")

_MADE_OF = {
    "split_stages": ("capture",),
    "trace_joint": ("split_stages",),
    "cast_gradients": ("trace_joint",),
    "logical_random": ("cast_gradients", "trace_joint"),
    "decompose_for_sharding": ("logical_random",),
    "propagate_layouts": ("decompose_for_sharding",),
    "shard_storage": ("propagate_layouts",),
    "insert_collectives": ("shard_storage", "propagate_layouts"),
    "gather_weights": ("insert_collectives",),
    "partition_forward": ("insert_collectives",),
    "partition_backward": ("insert_collectives",),
    "split_backward_inputs": ("partition_backward",),
    "split_backward_weights": ("partition_backward",),
    "reduce_gradients": ("insert_collectives",),
    **{
        f"{name}_{graph}": (*earlier, f"split_backward_{graph}", f"partition_{graph}")
        for graph in ("forward", "backward", "inputs", "weights")
        for name, earlier in (
            ("fuse_collectives", ()),
            ("overlap_collectives", (f"fuse_collectives_{graph}",)),
        )
    },
}
"""The passes that a pass may take its graph from: the first of them that was dumped is the one."""


@dataclass(frozen=True, slots=True)
class GraphText:
    """What one pass left of a stage; `stage` is None for the whole program."""

    number: int
    name: str
    stage: int | None
    text: str


def read_graphs(folder: Path, ranks: Iterable[int]) -> list[GraphText]:
    """The graphs that `ranks` have dumped, in the order of passes; of several of one pass and stage, the first."""
    found: dict[tuple[str, int | None], GraphText] = {}
    for rank in ranks:
        for path in sorted((folder / f"rank{rank}").glob("*.py")):
            if match := _FILE.fullmatch(path.name):
                stage = None if match["stage"] is None else int(match["stage"])
                if (match["name"], stage) not in found:
                    text = path.read_text(encoding="utf-8")
                    found[match["name"], stage] = GraphText(int(match["number"]), match["name"], stage, text)
    return sorted(found.values(), key=lambda each: (each.number, -1 if each.stage is None else each.stage))


def packed_graphs(graphs: Iterable[GraphText]) -> dict[str, Any]:
    """The graphs for the page: by stage, the passes with what they are made of, and all texts compressed together."""
    by_stage: dict[int | None, dict[str, str]] = {}
    for each in graphs:
        by_stage.setdefault(each.stage, {})[each.name] = each.text
    whole = by_stage.pop(None, {})
    groups = {"program": whole} | {f"stage {stage}": texts for stage, texts in sorted(_numbered(by_stage))}
    return {
        name: {
            "passes": [[each, _made_of(each, texts | whole), len(texts[each].splitlines())] for each in texts],
            "texts": _compressed(texts),
        }
        for name, texts in groups.items()
        if texts
    }


def _numbered(by_stage: Mapping[int | None, dict[str, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    yield from ((stage, texts) for stage, texts in by_stage.items() if stage is not None)


def _made_of(name: str, known: Mapping[str, str]) -> str | None:
    return next((earlier for earlier in _MADE_OF.get(name, ()) if earlier in known), None)


def _compressed(texts: Mapping[str, str]) -> str:
    """JSON of the texts, as `DecompressionStream("deflate")` of browsers reads it, in base64."""
    return base64.b64encode(zlib.compress(json.dumps(texts).encode(), 9)).decode()
