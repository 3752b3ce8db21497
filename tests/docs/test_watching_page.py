"""The programs of docs/watching.md run, and what they write is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")


def test_the_blocks_of_the_page_run_one_after_another(tmp_path: Path) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    environment = os.environ | {"FXPAR_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = dict(line.split() for line in done.stdout.splitlines())
    quoted = set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)) | {"exposed_communication_share", "tokens_per_s"}
    assert printed.keys() == quoted, "the table has all figures"
    assert {file.name for file in (tmp_path / "measured").iterdir()} == {"trace.json", "timeline.rank0.json"}
    assert "DEBUG:fxpar:" in done.stderr and "INFO:fxpar:compiled the training step" in done.stderr
