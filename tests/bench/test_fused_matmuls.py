"""The matmuls among which the baseline of fused ops is chosen: all right, and divided as the fused ops divide."""

from __future__ import annotations

import pytest
import torch

from fxpar.bench.fused.matmuls import MATMULS, matmuls
from fxpar.lowering.cpu.terms import Terms


@pytest.mark.parametrize("op", ["gather", "scatter"])
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_every_matmul_gives_the_product(op: str, hosts: tuple[int, ...]) -> None:
    left, right = torch.randn(1024, 40), torch.randn(1100, 40).t()
    found = matmuls(op, right, 1024, hosts)
    assert tuple(found) == MATMULS
    for name, multiply in found.items():
        torch.testing.assert_close(multiply(left), left @ right, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("op", "hosts", "expected"),
    [
        ("gather", (0, 0), [512] * 2),
        ("gather", (0, 1), [256, 128, 128] * 2),
        ("scatter", (0, 1), [128] * 8),
    ],
)
def test_chunks_are_those_of_the_fused_op_on_such_hosts(
    op: str, hosts: tuple[int, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = torch.randn(1024, 256), torch.randn(256, 256).t()
    rows: list[int] = []
    monkeypatch.setattr(Terms, "compute", lambda terms, part, chunk, out: rows.append(len(chunk.rows)))
    matmuls(op, right, 1024, hosts)[MATMULS[-1]](left)
    assert rows == expected
