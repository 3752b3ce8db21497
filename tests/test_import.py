"""`import fxpar` is quick: it imports nothing that takes time before it is used, and every public name is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import fxpar

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "scipy", "sympy", "networkx", "rich", "triton")
IMPORTED = "import torch, sys; before = set(sys.modules); import fxpar; print(*sorted(set(sys.modules) - before))"


def test_importing_fxpar_imports_next_to_nothing_beside_torch() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True).stdout.split()
    assert "fxpar" in found
    assert not [name for name in found if name.startswith(HEAVY)]
    assert len(found) < 10, found


def test_a_mesh_is_there_before_the_compiler_is_imported() -> None:
    program = "import sys, fxpar; fxpar.init_mesh()\nfrom fxpar.progress.display import showing\n"
    program += "with showing('work'): print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "torch.distributed" in found
    assert not [name for name in found if name.startswith(("torch._dynamo", "torch._inductor", "triton", "rich"))]


@pytest.mark.parametrize(("given", "expected"), [({}, "32 0"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "16"}, "16 0")])
def test_what_cuda_and_nccl_read_once_is_set_unless_it_was(given: dict[str, str], expected: str) -> None:
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_RUNTIME_CONNECT")
    program = f"import os, fxpar; print(*(os.environ[name] for name in {names}))"
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert found.strip() == expected


@pytest.mark.parametrize("name", fxpar.__all__)
def test_every_public_name_can_be_had_and_is_listed(name: str) -> None:
    assert getattr(fxpar, name) is not None
    assert name in dir(fxpar)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fxpar' has no attribute 'distrbute'"):
        _ = fxpar.distrbute
