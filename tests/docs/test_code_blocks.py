"""Commands in the README and on pages are right, and print what is shown; test_programs.py runs the Python."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from fxpar.cli import _parser, main
from fxpar.explainer import tables
from tests.support.doc_blocks import FENCED, ROOT, Block, blocks_of, commands_of, pages, place

LANGUAGES = {"python", "py", "text", "sh", "console", "log", "output"}
"""Those that a test knows what to do with."""


def test_every_block_is_in_a_language_that_is_tested() -> None:
    found = {(page.name, match[1]) for page in pages() for match in FENCED.finditer(page.read_text())}
    assert {name for _, name in found} == LANGUAGES, found


@pytest.mark.parametrize("page", [page for page in pages() if blocks_of(page, "sh")], ids=lambda page: page.name)
def test_the_arguments_of_commands_are_right(page: Path) -> None:
    for command in commands_of(page):
        _check(shlex.split(command))


def test_the_batch_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    (job,) = (block for block in blocks_of(ROOT / "docs" / "launch.md", "sh") if block.is_script)
    slurm = {"scontrol": "printf 'first\\nsecond\\n'", "srun": 'printf "%s\\n" "$*"'}
    for name, what in slurm.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{what}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "nodes"}
    ran = subprocess.run(["bash", "-eu", "-c", job.text], env=path | given, capture_output=True, text=True, check=True)
    command, *arguments = shlex.split(ran.stdout)
    launch = parse_args(arguments)
    assert command == "torchrun" and launch.training_script == "train.py"
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_endpoint) == ("2", "8", "first:29500")


@pytest.mark.parametrize("block", [block for page in pages() for block in blocks_of(page, "console")], ids=place)
def test_a_command_prints_what_the_page_shows(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    command, expected = block.text.removeprefix("$ ").replace("\\\n", " ").split("\n", 1)
    assert main(shlex.split(command)[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == expected.splitlines()


@pytest.mark.parametrize("block", [block for page in pages() for block in blocks_of(page, "log")], ids=place)
def test_lines_of_the_log_have_the_form_that_they_are_told_in(block: Block) -> None:
    for line in block.text.splitlines():
        assert re.fullmatch(r"fxpar: (distributed \w+ over|(compiled|took|loaded) .* step) .*in [\d.]+ s(: .*)?", line)


@pytest.mark.parametrize("block", [block for page in pages() for block in blocks_of(page, "output")], ids=place)
def test_tables_have_the_columns_that_the_command_shows(block: Block) -> None:
    columns = {cell.strip() for line in block.text.splitlines() if line.startswith("┃") for cell in line.split("┃")}
    shown = Path(tables.__file__).read_text(encoding="utf-8")
    assert len(columns) > 10 and not [column for column in columns if column and f'"{column}"' not in shown]


def _check(command: list[str]) -> None:
    """Read the arguments as the command would; what it does is tested elsewhere."""
    match command:
        case ["fxpar", *arguments]:
            _parser().parse_args(arguments)
        case ["make", target]:
            assert f"\n{target}: install\n" in (ROOT / "Makefile").read_text()
        case ["torchrun", *arguments]:
            launch = parse_args(arguments)
            if launch.no_python:
                _check([launch.training_script, *launch.training_script_args])
            else:
                assert launch.training_script == "train.py"  # that of the page
        case (
            ["python", "-m", "build"]
            | ["pip", "install", "dist/fxpar-*.whl"]
            | ["mkdir", "-p", "results"]
            | ["tlparse", *_]
        ):
            pass
        case [word, *others] if re.fullmatch(r"[A-Z_]+=.*", word):
            _check(others)
        case _:
            pytest.fail(f"no test knows how to check {command}")
