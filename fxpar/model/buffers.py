"""Assign each buffer that a forward changes to the stage that changes it; all others are the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fxpar._torch.compiler import is_in_state_dict, leave_out_of_state_dict
from fxpar.errors import SharedBufferError
from fxpar.ir.capture import Capture
from fxpar.ir.stage import PlannedStage, Port, PortKind
from fxpar.model.distribution import Distribution


def assign_buffers(capture: Capture, stages: Sequence[PlannedStage], distribution: Distribution) -> None:
    """Record which stage changes each buffer, and leave the buffer out of the state dicts of all other pipe ranks.

    A buffer that no captured forward has changed so far (a mask, a rotary table, running statistics in evaluation) is
    the same on every rank: all ranks save and load it, so that any stage may read it later.

    Raises:
        SharedBufferError: a stage reads or changes a buffer that another stage changes.
    """
    names = _names(capture, distribution.model)
    owners = distribution.buffer_stages
    for stage in stages:
        for port in stage.joint.outputs:
            if port.kind is PortKind.BUFFER:
                owners.setdefault(names[port], stage.joint.index)
    for stage in stages:
        for port in (*stage.joint.inputs, *stage.joint.outputs):
            owner = owners.get(names[port]) if port.kind is PortKind.BUFFER else None
            if owner is not None and owner != stage.joint.index:
                raise SharedBufferError(names[port], owner, stage.joint.index)
    _leave_out_others(distribution)


def record_buffers(stages: Mapping[str, int], distribution: Distribution) -> None:
    """Record which stage changes each buffer, as `assign_buffers` found out for an equal model."""
    distribution.buffer_stages.update(stages)
    _leave_out_others(distribution)


def _names(capture: Capture, model: nn.Module) -> dict[Port, str]:
    """The buffers' fully qualified names; for tensors that no module registered, Dynamo's names."""
    registered = {id(buffer): name for name, buffer in model.named_buffers()}
    return {port: registered.get(id(tensor), port.name) for port, tensor in capture.buffers.items()}


def _leave_out_others(distribution: Distribution) -> None:
    pipe, placement = distribution.mesh.coordinate["pipe"], distribution.placement
    of_others = {name for name, stage in distribution.buffer_stages.items() if placement[stage] != pipe}
    buffers = dict(distribution.model.named_buffers(remove_duplicate=False))
    tensors = {id(buffers[name]) for name in of_others if name in buffers}
    for path, module in distribution.model.named_modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            if id(buffer) in tensors:
                leave_out_of_state_dict(module, attribute)
                distribution.foreign_buffers.add(f"{path}.{attribute}" if path else attribute)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `model` saves and loads on this rank, by all of their names."""
    return {
        f"{path}.{attribute}" if path else attribute: buffer
        for path, module in model.named_modules()
        for attribute, buffer in module._buffers.items()
        if buffer is not None and is_in_state_dict(module, attribute)
    }
