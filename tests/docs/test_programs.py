"""The Python of the README and of all pages runs on four ranks, and pages show what it writes."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest

from fxpar.cli import main
from tests.support.doc_blocks import ROOT, Program, blocks_of, commands_of, pages, place, run_on_ranks

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
WATCHED = """
logging.getLogger("fxpar").setLevel(logging.NOTSET)
stage = mesh.coordinate["pipe"]
assert {f"{stage}{kind}{microbatch}" for kind in "FB" for microbatch in range(4)} <= names
assert 0 <= stats["bubble_share"] < 1
assert set(stats) == {
    "step_s", "bubble_share", "exposed_communication_s", "exposed_communication_share", "peak_memory_bytes",
    "samples_per_s", "tokens_per_s", "flops_per_s", "mfu",
}
from pathlib import Path
written = {"trace.json", "timeline.rank0.json", "timeline.rank2.json"}
assert mesh.rank or {file.name for file in Path("measured").iterdir()} == written
"""
REPORTED = """
step(tokens, targets).backward()
assert mesh.rank or Path("dump/report.html").read_text().startswith("<!doctype html>")
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
    "report.md": ("from pathlib import Path", REPORTED),
    "watching.md": ("", WATCHED),
    "reshard.md": ("", "assert mesh.rank == 0 or torch.equal(moved.to_local(), torch.arange(70.0).view(7, 10))"),
}


def test_programs_run_and_pages_show_what_they_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, since the programs of all pages run on the same ranks: that of the README first."""
    programs = [
        Program(page.name, blocks, *PROGRAMS.get(page.name, ()))
        for page in pages()
        if page != OF_EXAMPLES and (blocks := blocks_of(page, "python"))
    ]
    assert programs[0].page == "README.md" and {*PROGRAMS} < {program.page for program in programs}
    for rank, failed in enumerate(run_on_ranks(tmp_path, programs)):
        assert not failed, f"rank {rank}:\n" + "\n".join(failed.values())

    _check_quoted_lines(tmp_path / "dump-of-readme")
    _check_picture(tmp_path / "dump-of-readme")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(command) for command in commands_of(ROOT / "docs" / "dump.md")]
    assert len(commands) == 2
    for _, *arguments in commands:
        assert main(arguments) == 0
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


def _check_quoted_lines(dump: Path) -> None:
    dumped = {line for path in dump.glob("rank0/*.*") for line in path.read_text().splitlines()}
    quotes = [block for page in pages() for language in ("py", "text") for block in blocks_of(page, language)]
    lines = [(block, line) for block in quotes for line in block.text.splitlines() if line]
    assert len(lines) >= 30
    assert not [f"{place(block)}: {line}" for block, line in lines if line not in dumped]


def _check_picture(dump: Path) -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_readme_picture.py"))["draw"](dump)
    committed = (ROOT / "docs" / "readme_picture.svg").read_text(encoding="utf-8")
    assert committed == drawn, "docs/readme_picture.svg is out of date: run `python docs/draw_readme_picture.py`"
