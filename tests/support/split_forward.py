"""The stages of a forward, run one after another in this process, compute what the whole forward computes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fxpar.ir.capture import Capture, example
from fxpar.ir.stage import Port, PortKind, StageGraph
from fxpar.passes.split_stages import split_stages
from tests.support.captures import captured


def run_stages(stages: Sequence[StageGraph], values: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
    """Run the stages one after another on real values, handing edges on."""
    known = dict(values)
    for stage in stages:
        outputs = stage.module(*(known[port] for port in stage.inputs))
        known.update(zip(stage.outputs, outputs, strict=True))
    return known


def check(model: nn.Module, boundaries: Sequence[str], *args: Tensor) -> list[StageGraph]:
    """Split `model`, compare the stages' result and gradients with the model's own, and return the stages."""
    (stages,) = check_all(model, [boundaries], *args)
    return stages


def check_all(model: nn.Module, ways: Iterable[Sequence[str]], *args: Tensor) -> list[list[StageGraph]]:
    """As `check`, for several ways to split what is captured once."""
    reference = copy.deepcopy(model)
    capture, _ = captured(model, args)
    expected = reference(*(arg.clone() for arg in args))
    expected.backward()
    found = []
    for boundaries in ways:
        stages = split_stages(capture, boundaries)
        parameters = {name: p.detach().clone().requires_grad_() for name, p in reference.named_parameters()}
        values = {Port(PortKind.PARAMETER, name): p for name, p in parameters.items()}
        values |= {Port(PortKind.INPUT, str(i)): arg for i, arg in enumerate(args)}
        values |= _buffers(capture, model)
        loss = run_stages(stages, values)[Port(PortKind.RESULT, "0")]
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(parameters[name].grad, parameter.grad, msg=lambda m, n=name: f"{n}: {m}")
        found.append(list(stages))
    return found


def _buffers(capture: Capture, model: nn.Module) -> dict[Port, Tensor]:
    """The buffers that the forward reads, matched by shape (the test models have at most one of a shape)."""
    held = {tuple(buffer.shape): buffer for buffer in model.buffers()}
    ports = {port: node for node, port in capture.sources.items() if port.kind is PortKind.BUFFER}
    return {port: held[tuple(example(node).shape)] for port, node in ports.items()}
