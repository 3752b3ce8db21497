"""Code that Inductor generated for a region serves later launches, and only those that would generate the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar._torch.compiler import FakeTensorMode, make_fx
from fxpar.cache.folder import CacheFolder
from fxpar.lowering import inductor
from fxpar.world.launch import run_ranks
from tests.lowering.graphs import note_generated


def program(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    h = torch.nn.functional.gelu(x @ weight)
    return (h.softmax(-1), h.t().contiguous())


def lower_and_run(rows: int, threads: int, options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """What the lowered program returns, and how many regions Inductor generated code for."""
    torch.set_num_threads(threads)
    generated = note_generated()
    x, weight = torch.linspace(-1, 1, rows * 8).view(rows, 8), torch.linspace(0, 2, 64).view(8, 8)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (x, weight)]
        graph = make_fx(program)(*fakes)
    with torch._inductor.config.patch(options):
        return list(inductor.lower_to_inductor(graph)(x, weight)), len(generated)


def launch(folder: Path, rows: int = 6, threads: int = 1, **options: Any) -> tuple[list[Tensor], int]:
    """The same in a process of its own."""
    cache = {"FXPAR_CACHE_DIR": str(folder)}
    ((found, generated),) = run_ranks(1, lower_and_run, rows, threads, options, environment=cache)
    return found, generated


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A cache with the code of one launch, and what that computed."""
    folder = tmp_path_factory.mktemp("cache")
    found, generated = launch(folder)
    assert generated > 0
    x, weight = torch.linspace(-1, 1, 48).view(6, 8), torch.linspace(0, 2, 64).view(8, 8)
    torch.testing.assert_close(tuple(found), program(x, weight))
    return folder, found


def test_a_later_launch_generates_nothing_and_computes_the_same_bits(first: tuple[Path, list[Tensor]]) -> None:
    folder, expected = first
    found, generated = launch(folder)
    assert generated == 0
    assert all(map(torch.equal, found, expected))
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]


IN_A_FRESH_INTERPRETER = """
import sys
from tests.lowering.test_kept_code import lower_and_run
_, generated = lower_and_run(6, 1, {})
print(generated, [name for name in ("lowering", "select_algorithm") if f"torch._inductor.{name}" in sys.modules])
"""


def test_a_later_launch_does_not_import_the_modules_that_generate_code(first: tuple[Path, list[Tensor]]) -> None:
    folder, _ = first
    command = [sys.executable, "-c", IN_A_FRESH_INTERPRETER]
    environment = os.environ | {"FXPAR_CACHE_DIR": str(folder)}
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.split("\n")[0] == "0 []"


def test_other_shapes_options_and_numbers_of_threads_generate_code_of_their_own(
    first: tuple[Path, list[Tensor]],
) -> None:
    folder, _ = first
    _, for_more_rows = launch(folder, rows=7)
    _, with_option = launch(folder, epilogue_fusion=False)
    _, for_more_threads = launch(folder, threads=2)
    assert for_more_rows > 0
    assert for_more_threads > 0
    assert with_option > 0


def test_damaged_code_is_generated_again(first: tuple[Path, list[Tensor]]) -> None:
    folder, expected = first
    for file in CacheFolder(folder)._files():
        file.write_bytes(file.read_bytes()[:-1])
    found, generated = launch(folder)
    assert generated > 0
    assert all(map(torch.equal, found, expected))
