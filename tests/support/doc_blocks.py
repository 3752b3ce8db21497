"""The code blocks of the README and of the pages in docs/, and how the Python among them runs on ranks.

The `python` blocks of a page are one program; `py` and `text` blocks quote the dump of the README's program; `sh`
blocks have commands, and `console` blocks a command and what it prints.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fxpar.world.launch import run_ranks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `line` is that of its first line in the page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_script(self) -> bool:
        """Whether it is the text of a file, and not commands to type."""
        return self.text.startswith("#!")


def place(block: Block) -> str:
    """Where a block is, for people."""
    return f"{block.page}:{block.line}"


def pages() -> list[Path]:
    """The README and all pages."""
    return [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path, language: str) -> list[Block]:
    """The blocks of `page` in `language`, in order."""
    text = page.read_text(encoding="utf-8")
    found = FENCED.finditer(text)
    return [
        Block(page.name, text.count("\n", 0, match.start()) + 2, language, match[2])
        for match in found
        if match[1] == language
    ]


def commands_of(page: Path) -> list[str]:
    """The commands in the `sh` blocks of `page`, without comments and redirections."""
    text = "".join(block.text for block in blocks_of(page, "sh") if not block.is_script).replace("\\\n", " ")
    return [re.sub(r"\s#.*| > .*", "", line) for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class Program:
    """The Python of a page, after `before`, which defines what its reader has, and before `after`, which uses it."""

    page: str
    blocks: Sequence[Block]
    before: str = ""
    after: str = ""


def run_readme(folder: Path) -> None:
    """Run the README's program on four ranks in `folder`, where it leaves its dump."""
    for failed in run_on_ranks(folder, [Program("README.md", blocks_of(README, "python"))]):
        assert not failed, failed


def run_on_ranks(folder: Path, programs: Sequence[Program]) -> list[dict[str, str]]:
    """`run_programs` on four ranks of two hosts; returns what it returns on each."""
    environment = {"WORLD_SIZE": "4", "FXPAR_CACHE_DIR": "", "CUDA_VISIBLE_DEVICES": ""}
    return run_ranks(4, run_programs, folder, programs, environment=environment, enter=_on_two_hosts)


def _on_two_hosts(rank: int) -> None:
    os.environ["FXPAR_HOST"] = f"host {rank // 2}"


def run_programs(folder: Path, programs: Sequence[Program]) -> dict[str, str]:
    """Run the programs one after another on this rank, in `folder`; returns the traceback of each one that failed.

    The first is what the others go on from: they start with its names, such as the compiled step.
    """
    os.chdir(folder)
    torch.compile = _compile_by_aten(torch.compile)
    failed: dict[str, str] = {}
    started: dict[str, Any] = {}
    for program in programs:
        module = sys.modules[f"program_{program.page[:-3]}"] = ModuleType(f"program_{program.page[:-3]}")
        names = module.__dict__  # Dynamo looks up a model's globals in its module
        names |= started
        try:
            exec(program.before, names)
            for block in program.blocks:
                exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
            exec(program.after, names)
        except Exception:
            failed[program.page] = traceback.format_exc()
        started = started or {name: value for name, value in names.items() if not name.startswith("__")}
    return failed


def _compile_by_aten(torch_compile: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that runs ops one by one where no lowering is asked for: compiling C++ would take most time."""

    @functools.wraps(torch_compile)
    def compile_model(*args: Any, **settings: Any) -> Any:
        if settings.get("backend") == "fxpar":
            settings["options"] = {"lowering": "aten"} | settings.get("options", {})
        return torch_compile(*args, **settings)

    return compile_model
