"""Which file holds which tensors, so that the ranks of each stage write files of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.errors import InvalidOptionError
from fxpar.model.pretrained.lazy_tensor import LazyTensor
from fxpar.model.pretrained.stored_tensors import WEIGHTS

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file, the pipe index that holds all of its tensors, and their names in the file, in order."""

    name: str
    pipe: int
    tensors: tuple[str, ...]


def plan_files(stored: Mapping[str, LazyTensor], pipe_of: Mapping[str, int], max_bytes: int) -> list[PlannedFile]:
    """Divide `stored`, the tensors by their names in files, into files of at most `max_bytes`.

    Tensors keep their order. One that is larger has a file of its own.

    Args:
        pipe_of: the pipe index that holds each of the sources; all sources of one tensor must have the same.
    """
    groups: list[tuple[int, list[str]]] = []
    for pipe in sorted(set(pipe_of.values())):
        num_bytes = 0
        for name, tensor in stored.items():
            if pipe not in {pipe_of[source] for source in tensor.sources}:
                continue
            num_bytes += tensor.nbytes
            if not groups or groups[-1][0] != pipe or num_bytes > max_bytes:
                groups.append((pipe, []))
                num_bytes = tensor.nbytes
            groups[-1][1].append(name)
    return [
        PlannedFile(_file_name(number, len(groups)), pipe, tuple(names))
        for number, (pipe, names) in enumerate(groups, start=1)
    ]


def _file_name(number: int, count: int) -> str:
    return WEIGHTS if count == 1 else WEIGHTS.replace(".", f"-{number:05}-of-{count:05}.")


def without_crossing_stages(
    stored: Mapping[str, LazyTensor], whole: Mapping[str, LazyTensor], pipe_of: Mapping[str, int]
) -> dict[str, LazyTensor]:
    """`stored`, but where a tensor would be made of parameters on several pipe indices, these parameters themselves.

    No rank has them all; transformers also loads them under their own names.

    Args:
        whole: the model's tensors, by the names that `stored` has as sources.
    """
    crossing = [each.sources for each in stored.values() if len({pipe_of[source] for source in each.sources}) > 1]
    apart = frozenset[str]().union(*crossing)
    kept = {name: tensor for name, tensor in stored.items() if not tensor.sources & apart}
    return kept | {name: whole[name] for name in sorted(apart)}


def parse_num_bytes(size: int | str) -> int:
    """A number of bytes, given as such or as text with a unit, such as "5GB" (10^9 bytes each) or "5GiB" (2^30).

    Raises:
        InvalidOptionError: it is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)", str(size).upper())
    num_bytes = size if isinstance(size, int) else int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if num_bytes < 1:
        raise InvalidOptionError("max_shard_size", size, 'a positive number of bytes, or text such as "5GB"')
    return num_bytes
