"""The memory of one stage of this rank, from its local graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from fxpar.graph.extract import returned
from fxpar.graph.memory_owners import held_bytes
from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import JointGraph, Port, PortKind
from fxpar.passes.hoist_storage import Hoisted
from fxpar.passes.memory.activation_memory import ActivationMemory, KeptPort
from fxpar.schedule import Kind
from fxpar.schedule.memory import StageMemory

_ADAM_STATES = 2
"""Optimizer states that are assumed per trained weight: Adam's two moments."""


def stage_memory(
    local: JointGraph,
    hoisted: Hoisted,
    kept: ActivationMemory,
    own: Mapping[str, torch.dtype],
    working: Mapping[Kind, int],
) -> StageMemory:
    """The `StageMemory` of one stage, in bytes.

    Args:
        local: its graph before anything was hoisted out of it.
        kept: the activation memory of one microbatch.
        own: the parameters that its ranks own, which may be fewer than it uses, with the dtypes of their storage.
        working: as `working_bytes` returns it.
    """
    inputs, outputs, tangents, gradients = _port_bytes(local)
    weights = {port: tensor(node) for node, port in _placeholders(local) if _is_owned(port, own)}
    stored = {port: weight.numel() * own[port.name].itemsize for port, weight in weights.items()}
    copied = [weight.nbytes for port, weight in weights.items() if weight.dtype != own[port.name]]
    trained = [port for port in weights if port in gradients]
    results = sum(port.num_bytes for port in kept.outputs if port.port.kind is PortKind.RESULT)
    return StageMemory(
        parameters=sum(stored.values()) + sum(copied) + _gathered_bytes(hoisted),
        gradients=sum(size for port, size in gradients.items() if port.kind is PortKind.PARAMETER)
        + _unreduced_bytes(hoisted),
        optimizer=_ADAM_STATES * sum(stored[port] for port in trained),
        saved_for_inputs=kept.saved_until_inputs_bytes - _bytes_until(kept.outputs, ("I", "B")),
        saved_for_weights=kept.saved_until_weights_bytes - _bytes_until(kept.outputs, ("W",)),
        carried=kept.carried_bytes - sum(port.num_bytes for port in kept.gradients),
        results=kept.result_bytes + results,
        values=_of_edges(outputs, kept.outputs),
        gradients_of=_of_edges(tangents, kept.tangents),
        read=_of_edges(inputs, kept.inputs),
        returned=_of_edges(gradients, kept.gradients),
        values_until=_until(kept.outputs),
        read_until=_until(kept.inputs),
        gradients_of_until=frozenset(port.port.name for port in kept.tangents),
        returned_until=frozenset(port.port.name for port in kept.gradients),
        working=working,
        terms=sum(size for port, size in gradients.items() if port.kind is PortKind.PARAMETER)
        if hoisted.reductions is None
        else _unreduced_bytes(hoisted),
    )


def _placeholders(local: JointGraph) -> Iterable[tuple[fx.Node, Port]]:
    return zip(local.module.graph.find_nodes(op="placeholder"), local.inputs, strict=False)


def _is_owned(port: Port, own: Mapping[str, torch.dtype]) -> bool:
    return port.kind is PortKind.PARAMETER and port.name in own


def _gathered_bytes(hoisted: Hoisted) -> int:
    """Weights that are gathered once per step are in memory in addition to their shards."""
    return 0 if hoisted.gathers is None else held_bytes(returned(hoisted.gathers.module))


def _unreduced_bytes(hoisted: Hoisted) -> int:
    """Gradients that are reduced once per step are in memory whole, until they are reduced to shards."""
    if hoisted.reductions is None:
        return 0
    return sum(tensor(node).nbytes for node in hoisted.reductions.module.graph.find_nodes(op="placeholder"))


def _port_bytes(local: JointGraph) -> tuple[dict[Port, int], ...]:
    """The bytes of each port at the stage's border: inputs, outputs, tangents, gradients."""
    graph = local.module.graph
    entering = [tensor(node).nbytes for node in graph.find_nodes(op="placeholder")]
    (output,) = graph.find_nodes(op="output")
    leaving = [tensor(node).nbytes if isinstance(node, fx.Node) else 0 for node in output.args[0]]
    num_inputs, num_outputs = len(local.inputs), len(local.outputs)
    return (
        dict(zip(local.inputs, entering[:num_inputs], strict=True)),
        dict(zip(local.outputs, leaving[:num_outputs], strict=True)),
        dict(zip(local.tangents, entering[num_inputs:], strict=True)),
        dict(zip(local.gradients, leaving[num_outputs:], strict=True)),
    )


def _of_edges(sizes: Mapping[Port, int], kept: Iterable[KeptPort]) -> dict[str, int]:
    """Bytes by edge; an edge that is kept takes the whole memory that it is a part of."""
    whole = {each.port: each.num_bytes for each in kept}
    return {port.name: whole.get(port, size) for port, size in sizes.items() if port.kind is PortKind.EDGE}


def _until(ports: Iterable[KeptPort]) -> dict[str, Kind]:
    """By edge, the kind of action that frees it: W, or I, which also stands for a backward that is not split."""
    return {kept.port.name: "W" if kept.until == "W" else "I" for kept in ports if kept.port.kind is PortKind.EDGE}


def _bytes_until(ports: Iterable[KeptPort], until: Collection[str]) -> int:
    return sum(kept.num_bytes for kept in ports if kept.until in until)
