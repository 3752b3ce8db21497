"""Every code block of the README and of the pages runs, or is what it says that it is."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from fxpar.cli import _parser, main
from tests.support.doc_blocks import FENCED, ROOT, Block, Program, blocks_of, pages, place, run_on_ranks

LANGUAGES = {"python", "py", "text", "sh", "console"}
OF_EXAMPLES = ROOT / "docs" / "integrations.md"
"""Its code is compared with that of the examples."""

LLAMA = """
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=64, use_cache=False, **sizes)
inputs = {"input_ids": torch.zeros(8, 4, dtype=torch.long), "labels": torch.zeros(8, 4, dtype=torch.long)}
if mesh.rank == 0:
    LlamaForCausalLM(config).save_pretrained("pretrained")
dist.barrier()
"""
KEEP_DUMP = """
import shutil
import torch.distributed as dist
if mesh.rank == 0:
    shutil.copytree("dump", "dump-of-readme")  # later compiles replace its files
dist.barrier()
"""
PROGRAMS = {  # what their readers have, and what uses it
    "README.md": ("", KEEP_DUMP),
    "checkpoints.md": (LLAMA, "assert LlamaForCausalLM.from_pretrained('trained').config.hidden_size == 16"),
    "index.md": ("", "assert len(losses) == 5 and losses[-1] < losses[0]"),
    "launch.md": ("", "assert len(next(iter(loader))[0]) == 16"),
    "mesh.md": ("", "with torch.device('meta'): assert gpt()[0](*gpt()[1]).ndim == 0"),
    "sequences.md": (
        "from torch.nn.attention.flex_attention import create_block_mask",
        "assert batch['input_ids'].shape == batch['position_ids'].shape\n"
        "forward(None, tokens, targets, documents=torch.zeros_like(tokens))",
    ),
    "reshard.md": ("", "assert mesh.rank == 0 or torch.equal(moved.to_local(), torch.arange(70.0).view(7, 10))"),
}
RUN = ("simulate", "cache")
"""The commands of `fxpar` that take less than a second; of others, the arguments are checked."""

BLOCKS = {name: [block for page in pages() for block in blocks_of(page, name)] for name in LANGUAGES}
JOBS = [block for block in BLOCKS["sh"] if block.text.startswith("#!")]
PAGES_WITH_PROGRAMS = [page for page in pages() if page != OF_EXAMPLES and blocks_of(page, "python")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def failures(folder: Path) -> dict[str, str]:
    """Runs the programs of all pages on four ranks, that of the README first; the tracebacks of those that fail."""
    programs = [
        Program(page.name, blocks_of(page, "python"), *PROGRAMS.get(page.name, ())) for page in PAGES_WITH_PROGRAMS
    ]
    assert programs[0].page == "README.md" and len(programs) > 9
    return {page: text for rank in run_on_ranks(folder, programs) for page, text in rank.items()}


@pytest.mark.parametrize("page", [page.name for page in PAGES_WITH_PROGRAMS])
def test_the_python_of_the_page_runs_on_four_ranks(page: str, failures: dict[str, str]) -> None:
    assert page not in failures, failures[page]


def test_every_block_is_in_a_language_that_is_tested() -> None:
    found = {(page.name, match[1]) for page in pages() for match in FENCED.finditer(page.read_text())}
    assert {name for _, name in found} == LANGUAGES, found


def test_quoted_lines_are_those_of_the_dump(folder: Path, failures: dict[str, str]) -> None:
    assert "README.md" not in failures
    dumped = {line for path in (folder / "dump-of-readme").glob("rank0/*.*") for line in path.read_text().splitlines()}
    quoted = [(block, line) for block in BLOCKS["py"] + BLOCKS["text"] for line in block.text.splitlines()]
    assert len(quoted) > 30
    assert not [f"{place(block)}: {line}" for block, line in quoted if line and line not in dumped]


def test_the_picture_is_what_the_script_draws_of_the_dump(folder: Path, failures: dict[str, str]) -> None:
    assert "README.md" not in failures
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_readme_picture.py"))["draw"](folder / "dump-of-readme")
    committed = (ROOT / "docs" / "readme_picture.svg").read_text(encoding="utf-8")
    assert committed == drawn, "docs/readme_picture.svg is out of date: run `python docs/draw_readme_picture.py`"


@pytest.mark.parametrize("block", [block for block in BLOCKS["sh"] if block not in JOBS], ids=place)
def test_commands_are_right(
    block: Block, folder: Path, failures: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "dump.md" not in failures
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FXPAR_CACHE_DIR", str(folder / "cache"))  # `fxpar cache --clear` clears it
    for command in block.text.replace("\\\n", " ").splitlines():
        _check(shlex.split(re.sub(r"\s#.*| > .*", "", command)))


def test_the_batch_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    (job,) = JOBS
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


@pytest.mark.parametrize("block", BLOCKS["console"], ids=place)
def test_a_command_prints_what_the_page_shows(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    command, expected = block.text.removeprefix("$ ").replace("\\\n", " ").split("\n", 1)
    assert main(shlex.split(command)[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == expected.splitlines()


def _check(command: list[str]) -> None:
    """Run a command, or check its arguments where that would take long."""
    match command:
        case ["fxpar", name, *_] if name in RUN:
            assert main(command[1:]) == 0
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
        case ["python", "-m", "build"] | ["pip", "install", "dist/fxpar-*.whl"] | ["mkdir", "-p", "results"]:
            pass  # a test builds a wheel, and installs it
        case _:
            pytest.fail(f"no test knows how to check {command}")
