"""What ranks compare of the programs that they captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpar.ir.capture import Capture
from tests.support.captures import captured


class WithPositions(nn.Module):
    """It makes values on a device of its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * torch.arange(4, device="cpu")).mean()


def on_device(capture: Capture, name: str) -> Capture:
    """As Dynamo would have captured it there, with the devices of its values and in its calls."""
    module, device = fx.GraphModule(capture.module, fx.Graph()), torch.device(name)
    module.graph.graph_copy(capture.module.graph, nodes := {})
    with FakeTensorMode(allow_fallback_kernels=False):
        for old, new in nodes.items():
            value = old.meta.get("example_value")
            if isinstance(value, Tensor):
                new.meta["example_value"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device, requires_grad=value.requires_grad
                )
            new.kwargs = {key: device if key == "device" else given for key, given in new.kwargs.items()}
    return replace(capture, module=module)


@pytest.fixture
def capture() -> Iterator[Capture]:
    found, _ = captured(WithPositions(), (torch.randn(2, 4),))
    assert any("device" in node.kwargs for node in found.module.graph.nodes)
    yield found


def test_ranks_on_different_devices_of_a_host_captured_one_program(capture: Capture) -> None:
    first, second = on_device(capture, "cuda:0"), on_device(capture, "cuda:1")
    assert first.signature == second.signature
    assert first.signature != on_device(capture, "cpu").signature


def test_another_operation_argument_or_shape_is_another_program(capture: Capture) -> None:
    signatures = {capture.signature}
    for model, batch in (
        (nn.Sequential(WithPositions()), torch.randn(3, 4)),
        (Doubled(), torch.randn(2, 4)),
        (Scaled(2.0), torch.randn(2, 4)),
        (Scaled(3.0), torch.randn(2, 4)),
    ):
        signatures.add(captured(model, (batch,))[0].signature)
    assert len(signatures) == 5


class Doubled(WithPositions):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


class Scaled(WithPositions):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor
