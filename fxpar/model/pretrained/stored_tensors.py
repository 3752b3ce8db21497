"""The tensors in a folder's safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from fxpar.errors import MissingPackageError, WeightFilesError
from fxpar.model.pretrained.lazy_tensor import Box, LazyTensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file with all tensors, or else the one that says which file holds which tensor."""

_REMEDY = "download or save these weights again"


def stored_tensors(folder: Path) -> dict[str, LazyTensor]:
    """All tensors in the folder by their names there, from the headers of its files; values are read as they are used.

    Files are mapped into memory: a part of a tensor is a view of the pages that it touches, which the system reads
    then, and drops where memory is short.

    Raises:
        MissingPackageError: safetensors is not installed.
        WeightFilesError: the folder has no such files, or one is missing or damaged.
    """
    stored: dict[str, LazyTensor] = {}
    for path, expected in _files(folder).items():
        found = _tensors_of(path)
        absent = [name for name in expected if name not in found]
        if absent:
            raise WeightFilesError(path, f"expected the tensor {absent[0]} here, as {INDEX} says", _REMEDY)
        stored |= found
    return stored


def require_safetensors() -> None:
    """Check that safetensors is installed, which fxpar does not depend on otherwise.

    Raises:
        MissingPackageError: it is not.
    """
    if find_spec("safetensors") is None:
        raise MissingPackageError("safetensors", "reads and writes files of weights")


def _files(folder: Path) -> Mapping[Path, Sequence[str]]:
    """The files, each with the names of tensors that are known to be there."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: ()}
    if (folder / INDEX).is_file():
        return _files_of_index(folder / INDEX)
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    raise WeightFilesError(
        folder,
        f"expected {WEIGHTS} or {INDEX}, found {', '.join(found[:10]) or 'no files'}",
        "convert weights of another format in one process: transformers' from_pretrained, then save_pretrained",
    )


def _files_of_index(index: Path) -> dict[Path, list[str]]:
    try:
        file_of = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightFilesError(index, f"expected JSON with a weight_map, but: {error!r}", _REMEDY) from error
    tensors: dict[Path, list[str]] = {}
    for name, file in file_of.items():
        tensors.setdefault(index.parent / str(file), []).append(name)
    missing = [path.name for path in tensors if not path.is_file()]
    if missing:
        problem = f"names {len(tensors)} files, but {len(missing)} of them are not there: {', '.join(missing[:5])}"
        raise WeightFilesError(index, problem, "copy or download them, too")
    return tensors


def _tensors_of(path: Path) -> dict[str, LazyTensor]:
    require_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise WeightFilesError(path, f"is truncated or no safetensors file ({error})", _REMEDY) from error
    return {name: _stored(name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118  # it is no dict


def _stored(name: str, stored: Any) -> LazyTensor:
    def copy_part(box: Box, target: Tensor) -> None:
        target.copy_(stored[box])

    return LazyTensor(stored[()], copy_part, frozenset([name]))  # [()] is a view of the file, and reads nothing
