"""Messages name the line of a model's code, also that of an example, which is packaged with fxpar."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

import fxpar
from fxpar.ir.node_meta import source_line

PACKAGE = Path(fxpar.__file__).parent
OWN = f'File "{PACKAGE / "model" / "logical.py"}", line 1, in forward'
TORCHS = f'File "{Path(torch.__file__).parent / "nn" / "modules" / "module.py"}", line 2, in forward'


@pytest.mark.parametrize("model", ["/home/user/model.py", str(PACKAGE / "examples" / "gpt.py")])
def test_frames_of_torch_and_fxpar_are_left_out_but_for_the_examples(model: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'{OWN}\n  File "{model}", line 7, in forward\n    x = x + 1\n{TORCHS}'
    assert source_line(node) == f'File "{model}", line 7, in forward'


def test_where_no_frame_is_a_users_the_innermost_is_named() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f"{TORCHS}\n{OWN}"
    assert source_line(node) == OWN
