"""`save_pretrained`: write a distributed model as safetensors that one process can load, a parameter at a time."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fxpar.model.distribution import Distribution, distribution_of_model
from fxpar.model.pretrained.conversions import as_in_files, is_of_transformers
from fxpar.model.pretrained.gathered_tensors import gathered_tensors
from fxpar.model.pretrained.lazy_tensor import LazyTensor
from fxpar.model.pretrained.plan_files import PlannedFile, parse_num_bytes, plan_files, without_crossing_stages
from fxpar.model.pretrained.stored_tensors import INDEX, require_safetensors
from fxpar.world.agreement import failing_together
from fxpar.world.mesh import Mesh

_STAGING = ".incomplete"
"""The folder, in the one that is saved to, where files are written before they are moved to their place."""


def save_pretrained(model: nn.Module, folder: str | PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Save a distributed model as safetensors, as one process loads them. A collective of all ranks.

    `from_pretrained` reads a model of transformers from the folder: the config is saved as well, and weights have the
    names and forms of transformers' own files. Other models have the names of their state dict; a tied parameter is
    stored once, under the first of its names.

    The first rank of each pipe index writes the tensors of its stages, while all ranks of the stages gather one
    parameter at a time. Files are moved to their place when all are complete, and those of an earlier save are removed.

    Args:
        model: what `fxpar.distribute` returned, or `torch.compile` of it.
        folder: on a file system that all hosts share; it is created if it is not there.
        max_shard_size: the size of a file, in bytes or as text such as "5GB", which the rank that writes it holds in
            memory; a tensor that is larger has a file of its own.

    Raises:
        PlainModelError, InvalidOptionError, MissingPackageError
        OSError: a file cannot be written; the folder then has what it had before.
        FailedOnOtherRankError: another rank raised one of these.
        PeerLostError: another rank has ended.
    """
    distribution = distribution_of_model(model, "fxpar.save_pretrained")
    max_bytes = parse_num_bytes(max_shard_size)
    work, target = f"save the model in {folder}", Path(folder)
    staging, is_first = target / _STAGING, distribution.mesh.rank == 0
    whole, pipe_of = gathered_tensors(distribution)
    with failing_together(work):
        require_safetensors()
        stored = without_crossing_stages(as_in_files(whole, distribution.model), whole, pipe_of)
        files = plan_files(stored, pipe_of, max_bytes)
        if is_first:
            shutil.rmtree(staging, ignore_errors=True)  # of a save that was interrupted
            staging.mkdir(parents=True)
    try:
        with failing_together(work):
            _write_weights(files, stored, distribution.mesh, staging)
            if is_first:
                _write_index(files, stored, staging)
                _write_config(distribution, staging)
        with failing_together(work):
            _move(staging, target, [file.name for file in files if _is_written_by(distribution.mesh, file)])
        with failing_together(work):
            if is_first:
                _move(staging, target, sorted(path.name for path in staging.iterdir()))
                _remove_others(target, {file.name for file in files})
    finally:
        if is_first:
            shutil.rmtree(staging, ignore_errors=True)


def _is_written_by(mesh: Mesh, file: PlannedFile) -> bool:
    return mesh.rank == mesh.rank_at({"pipe": file.pipe})


def _write_weights(files: Sequence[PlannedFile], stored: Mapping[str, LazyTensor], mesh: Mesh, folder: Path) -> None:
    """Gather the tensors of this rank's stages; where it is the first of its pipe index, write them, too.

    A rank that fails to write goes on to gather, since others wait for that.
    """
    from safetensors.torch import save_file

    problems: list[Exception] = []
    for file in files:
        if file.pipe != mesh.coordinate["pipe"]:
            continue
        tensors: dict[str, Tensor] = {}
        for name in file.tensors:
            writes = _is_written_by(mesh, file) and not problems
            whole = stored[name].whole("cpu" if writes else "meta")
            if writes:
                tensors[name] = whole
        try:
            if tensors:
                save_file(tensors, folder / file.name, metadata={"format": "pt"})
        except Exception as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _write_index(files: Sequence[PlannedFile], stored: Mapping[str, LazyTensor], folder: Path) -> None:
    """Write which file has which tensor, if there are several."""
    if len(files) == 1:
        return
    file_of = {name: file.name for file in files for name in file.tensors}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
        "weight_map": {name: file_of[name] for name in sorted(file_of)},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(distribution: Distribution, folder: Path) -> None:
    """Write the config of a model of transformers, and that of its `generate`, as its own `save_pretrained` does."""
    model: Any = distribution.model
    if not is_of_transformers(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(next(iter(distribution.parameters.values())).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _move(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        (source / name).replace(target / name)


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove the weights of an earlier save, which had other files: transformers would read those of them."""
    of_weights = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
    for path in folder.iterdir():
        if of_weights.fullmatch(path.name) and path.name not in names:
            path.unlink()
    if len(names) == 1:
        (folder / INDEX).unlink(missing_ok=True)
