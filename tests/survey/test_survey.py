"""Families of transformers train on meshes as on one process, by their authors' plans; findings are kept and shown."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import fxpar.survey.run
from fxpar.cli import main
from fxpar.survey.compare import Comparison
from fxpar.survey.families import Family, all_families
from fxpar.survey.heads import transformers_heads
from fxpar.survey.heads.tiny_config import shrink
from fxpar.survey.run import MESHES, Finding, Verdict, read_findings, survey
from fxpar.survey.table import to_markdown

PLANNED = ("llama", "qwen3", "mixtral", "deepseek_v3", "phi3")
"""Plain, with norms on heads whose gradients are partial, with experts, with latent attention, with fused weights."""


@pytest.mark.parametrize("name", PLANNED)
def test_a_family_trains_by_its_authors_plan(name: str, tmp_path: Path) -> None:
    (found,) = survey([Family(name, "causal-lm")], ["pipe=2 x x=2"], ["default"], tmp_path / "found.jsonl")
    assert found.verdict == "right", found.reason
    assert found.share < 0.35, "every rank holds about a quarter of the parameters"


TWENTIETH = list(zip(list(all_families(transformers_heads.HEADS))[10::20], itertools.cycle(MESHES), strict=False))
"""Of all families of all heads, on one mesh each; `make survey` tries all on all."""


@pytest.mark.parametrize(("family", "mesh"), TWENTIETH, ids=lambda each: getattr(each, "name", each))
def test_a_twentieth_of_the_families_trains_as_on_one_process(family: Family, mesh: str, tmp_path: Path) -> None:
    (found,) = survey([family], [mesh], ["default"], tmp_path / "found.jsonl")
    if found.verdict in ("does not train alone", "torch.compile fails"):
        pytest.skip(f"{found.verdict}: {found.reason}")
    assert found.verdict == "right", found.reason


def test_a_family_that_cannot_be_built_is_not_tried_on_ranks(tmp_path: Path) -> None:
    (found,) = survey([Family("dbrx", "causal-lm")], ["z=2"], ["default"], tmp_path / "found.jsonl")
    assert found.verdict == "does not train alone"
    assert found.reason.startswith("AttributeError: 'DbrxAttentionConfig' object has no attribute 'rope_theta'")


@pytest.mark.parametrize(("in_float64", "verdict"), [(3e-8, "right"), (3e-5, "wrong")])
def test_errors_that_float64_makes_much_smaller_are_rounding(
    in_float64: float, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*call: object) -> list[Comparison]:
        error = in_float64 if torch.float64 in call else 1.5e-4
        return [Comparison(0.0, error, "layer.bias", 0.5, (), by_plan=False)]

    monkeypatch.setattr(fxpar.survey.run, "_compare", compare)
    (found,) = survey([Family("llama", "causal-lm")], ["z=2"], ["default"], tmp_path / "found.jsonl")
    assert found.verdict == verdict
    assert found.gradient_error_in_float64 == in_float64


def test_configurations_are_shrunk_by_the_names_of_their_fields() -> None:
    config = transformers.CONFIG_MAPPING["gemma3_text"]()
    deep, kinds = config.num_hidden_layers, set(config.layer_types)
    shrink(config)
    assert config.num_hidden_layers == 2 < deep
    assert len(config.layer_types) == 2
    assert set(config.layer_types) == kinds
    assert config.hidden_size == config.num_attention_heads * config.head_dim
    smallest = next(Family("gemma3_text", "causal-lm").builds())()
    assert sum(parameter.numel() for parameter in smallest.parameters()) < 100_000


def test_all_families_of_the_heads_are_listed_once() -> None:
    families = list(all_families())
    assert len(families) == len(set(families)) > 200
    assert {Family("llama", "causal-lm"), Family("bert", "masked-lm")} <= set(families)


def finding(family: str, mesh: str, verdict: Verdict, reason: str = "") -> Finding:
    """What became of a family."""
    errors, share, seconds, without_rule = (0.0, 2e-7), 0.5, 3.0, ["aten.topk.default"]
    by_plan = family == "llama"
    return Finding(
        family, "causal-lm", mesh, "default", verdict, *errors, share, reason, seconds, without_rule, by_plan=by_plan
    )


def test_what_was_found_before_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def note(family: Family, mesh: str, layouts: str, lowering: str) -> Finding:
        tried.append((family.name, mesh))
        return finding(family.name, mesh, "right")

    monkeypatch.setattr(fxpar.survey.run, "_try", note)
    file, llama, gpt2 = tmp_path / "found.jsonl", Family("llama", "causal-lm"), Family("gpt2", "causal-lm")
    first = list(survey([llama], ["z=2", "x=2"], ["default"], file))
    assert tried == [("llama", "z=2"), ("llama", "x=2")]
    assert read_findings(file) == first
    assert list(survey([gpt2, llama], ["x=2"], ["default"], file)) == [finding("gpt2", "x=2", "right"), first[1]]
    assert tried[2:] == [("gpt2", "x=2")]


def test_the_search_is_tried_where_a_plan_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def note(family: Family, mesh: str, layouts: str, lowering: str) -> Finding:
        tried.append((family.name, layouts))
        return replace(finding(family.name, mesh, "right"), layouts=layouts)

    monkeypatch.setattr(fxpar.survey.run, "_try", note)
    families = [Family("llama", "causal-lm"), Family("gpt2", "causal-lm")]
    list(survey(families, ["x=2"], ["default", "search"], tmp_path / "found.jsonl"))
    assert tried == [("llama", "default"), ("llama", "search"), ("gpt2", "default")]


def test_the_table_has_a_row_for_a_family_and_a_line_for_a_reason() -> None:
    table = to_markdown(
        [
            finding("llama", "z=2", "right"),
            finding("llama", "x=2", "wrong", "gradient of head"),
            finding("ctrl", "z=2", "fails", "no rule"),
            finding("ctrl", "x=2", "fails", "no rule"),
        ]
    )
    assert "\n2 families, 4 runs: 2 fails, 1 right, 1 wrong.\n" in table
    assert "| llama | causal-lm | 2e-07, 0.50 | **2e-07**, 0.50 | aten.topk.default | 6 |" in table
    assert "| ctrl | causal-lm | fails | fails | aten.topk.default | 6 |" in table
    assert "- ctrl on z=2, x=2: no rule" in table


def test_the_command_prints_findings_and_writes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        fxpar.survey.run, "_try", lambda family, mesh, *_: finding(family.name, mesh, "fails", "no rule")
    )
    arguments = ["survey", "gpt2", "--heads", "causal-lm", "--meshes", "z=2", "--save", str(tmp_path / "found.jsonl")]
    assert main([*arguments, "--markdown", str(tmp_path / "table.md")]) == 1
    assert capsys.readouterr().out.split() == ["gpt2", "causal-lm", "z=2", "default", "fails", "no", "rule"]
    assert "| gpt2 | causal-lm | fails | aten.topk.default | 3 |" in (tmp_path / "table.md").read_text()
