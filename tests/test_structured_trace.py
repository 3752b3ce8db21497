"""TORCH_TRACE has the graph that each pass leaves, and tlparse shows it under the name of the pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import fxpar
from fxpar._torch.structured_trace import is_tracing
from fxpar.dump import Dump

TLPARSE = Path(sys.executable).with_name("tlparse")


class Model(nn.Module):
    """A product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def main(dump: str) -> None:
    """Compile the same step with a dump, and without."""
    mesh, x = fxpar.init_mesh(), torch.zeros(4, 4)
    for own in ({"dump": dump}, {}):
        model = Model()
        fxpar.distribute(model, mesh, example_inputs=(x,))
        torch.compile(model, backend="fxpar", options={"lowering": "aten", **own})(x).backward()


def test_tlparse_shows_what_dumps_have_under_the_names_of_passes(tmp_path: Path) -> None:
    trace, dump, shown = tmp_path / "trace", tmp_path / "dump", tmp_path / "shown"
    command = [sys.executable, "-m", "tests.test_structured_trace", str(dump)]
    subprocess.run(command, check=True, env=os.environ | {"TORCH_TRACE": str(trace)})
    (log,) = trace.glob("*.log")
    subprocess.run([TLPARSE, log, "-o", shown, "--no-browser"], check=True, capture_output=True)
    dumped = {file.stem: file.read_text() for file in (dump / "rank0").iterdir()}
    assert {"06_propagate_layouts.stage0", "10_partition_backward.stage0"} <= dumped.keys()
    texts: dict[str, list[str]] = {}
    for file in shown.rglob("fxpar_*"):
        texts.setdefault(re.sub(r"^fxpar_(.*)_\d+$", r"\1", file.stem), []).append(file.read_text())
    assert {name: len(found) for name, found in texts.items()} == dict.fromkeys(dumped, 2), "also without a dump"
    assert all(text in texts[name] for name, text in dumped.items())
    index = (shown / "index.html").read_text()
    assert all(f"fxpar_{name}" in index for name in dumped)


def test_without_a_trace_and_a_directory_nothing_is_formatted() -> None:
    assert not is_tracing()
    assert not Dump(None, 0, traces=True).is_read


if __name__ == "__main__":
    main(sys.argv[1])
