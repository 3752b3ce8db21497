"""An example as the program of a rank, for those that would take long to start by a launcher."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, arguments: Sequence[str], folder: Path) -> str:
    """Run it in `folder`; returns what this rank printed. For `run_ranks` with the WORLD_SIZE in the environment."""
    os.chdir(folder)
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))  # as for any program: the folder that it is in
    with redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            assert end.code is None, end.code
    return printed.getvalue()
