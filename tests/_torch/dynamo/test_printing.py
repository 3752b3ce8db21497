"""What a forward prints is printed while it is traced, and logging does not break the trace."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.captures import captured

_logger = logging.getLogger(__name__)


class Talking(nn.Module):
    def __init__(self, say: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.say = nn.Linear(2, 2), say

    def forward(self, x: Tensor) -> Tensor:
        self.say(x)
        return self.linear(x).sum()


PRINTED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "shape": (lambda x: print("of shape", tuple(x.shape)), "of shape (4, 2)\n"),
    "tensor": (lambda x: print(x.mean(), x.dtype), "Tensor(torch.float32, ()) torch.float32\n"),
    "formatted": (lambda x: print(f"mean {x.mean():.3f} of {len(x)}"), "mean Tensor(torch.float32, ()) of 4\n"),
    "number": (lambda x: print(x.mean().item()), "<float>\n"),
    "options": (
        lambda x: print([x, 1], {"x": x}, sep="-", end="!", flush=True),
        "[Tensor(torch.float32, (4, 2)), 1]-<dict>!",
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_it_is_printed_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    say, expected = PRINTED[name]
    captured(Talking(say), (torch.randn(4, 2),))
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "say",
    [
        lambda x: _logger.warning("of shape %s", x.shape),
        lambda x: _logger.isEnabledFor(logging.DEBUG) and _logger.debug("%s", x),
        lambda x: logging.info("of shape %s", x.shape),
        lambda x: warnings.warn("as it is", stacklevel=2),
    ],
)
def test_messages_do_not_break_the_trace(say: Callable[[Tensor], Any]) -> None:
    capture, _ = captured(Talking(say), (torch.randn(4, 2),))
    assert len(capture.results) == 1


def test_other_traces_stay_as_pytorch_makes_them() -> None:
    captured(Talking(print), (torch.randn(4, 2),))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
        torch.compile(lambda x: (print(x), x * 2), backend="eager", fullgraph=True)(torch.randn(2))
