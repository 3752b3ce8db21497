"""The transfers between stages as the page draws them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from fxpar.report.facts import StepFacts, TransferFacts


def transfers(facts: StepFacts) -> Iterator[dict[str, Any]]:
    """The transfers, where those that move alike between other stages are one, drawn for the first of them."""
    alike: dict[Any, tuple[TransferFacts, list[str]]] = {}
    for each in facts.transfers:
        alike.setdefault(_form(each), (each, []))[1].append(each.name)
    for first, names in alike.values():
        relays = [[r.task, r.num_bytes, r.path, r.readers, r.begin, r.end] for r in first.relays]
        yield {**asdict(replace(first, relays=())), "relays": relays, "names": names}


def _form(transfer: TransferFacts) -> Any:
    """What is equal for transfers that move alike: all but names, with ranks numbered as they occur."""
    numbers: dict[int, int] = {}

    def numbered(ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(rank, len(numbers)) for rank in ranks)

    relays = tuple(
        (each.task, each.num_bytes, numbered(each.path), tuple(map(numbered, each.readers)), each.begin, each.end)
        for each in transfer.relays
    )
    layouts = transfer.source_layout, transfer.target_layouts
    return transfer.is_gradient, transfer.once_per_step, layouts, transfer.strategy, transfer.num_bytes, relays
