"""The code on docs/integrations.md is that of the examples, which tests run."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
LIBRARIES = ("trainer", "accelerate", "lightning")
EXAMPLES = "".join((ROOT / "examples" / f"train_by_{name}.py").read_text() for name in LIBRARIES)


@pytest.mark.parametrize("block", re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
def test_each_block_is_in_an_example(block: str) -> None:
    for part in block.split("\n\n"):
        assert part in EXAMPLES or textwrap.indent(part, "    ") in EXAMPLES, part
