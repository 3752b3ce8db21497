"""save_pretrained: files that one process loads, all of them or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import fxpar
from fxpar.errors import InvalidOptionError, PlainModelError
from fxpar.model.pretrained.lazy_tensor import LazyTensor
from fxpar.model.pretrained.plan_files import parse_num_bytes, plan_files, without_crossing_stages
from fxpar.world.launch import run_ranks
from tests.model.train_with_buffers import Normed, seeded
from tests.support.fake_mesh import fake_mesh
from tests.support.pretrained import Two, save_where_one_rank_cannot_write
from tests.support.small_models import hf_llama, hf_mixtral


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_plain_model_is_saved_with_its_buffers_and_loads_in_one_process(tmp_path: Path) -> None:
    with fake_mesh() as mesh:
        fxpar.save_pretrained(fxpar.distribute(seeded(), mesh), tmp_path)
    assert names(tmp_path) == {"model.safetensors"}
    alone = Normed()
    alone.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, value in seeded().state_dict().items():
        assert torch.equal(alone.state_dict()[name], value), name


@pytest.mark.parametrize("build", [hf_llama, hf_mixtral])
def test_a_model_of_transformers_is_saved_as_transformers_saves_it(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone: Any = build()
    alone.save_pretrained(tmp_path / "alone")
    with fake_mesh() as mesh:
        fxpar.save_pretrained(fxpar.distribute(alone, mesh), tmp_path / "ours")
    assert names(tmp_path / "ours") == names(tmp_path / "alone")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads((tmp_path / "alone" / file).read_text())
    ours, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "alone"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_save_removes_the_files_of_the_one_before_and_leaves_all_others(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    with fake_mesh() as mesh:
        torch.manual_seed(0)
        model = fxpar.distribute(hf_llama(), mesh)
        fxpar.save_pretrained(model, tmp_path, max_shard_size=20_000)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 1 and files < names(tmp_path)
        assert index["metadata"]["total_size"] == sum(4 * parameter.numel() for parameter in model.parameters())
        several = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        fxpar.save_pretrained(model, tmp_path)
        assert names(tmp_path) == {"tokenizer.json", "config.json", "generation_config.json", "model.safetensors"}
        one = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(one[name], several[name]) for name in one)
        fxpar.save_pretrained(model, tmp_path, max_shard_size=20_000)
        assert names(tmp_path).isdisjoint({"model.safetensors"}), "transformers would read it first"


def test_where_one_rank_cannot_write_all_raise_and_the_folder_is_as_it_was(tmp_path: Path) -> None:
    (first, failed), (second, own) = run_ranks(2, save_where_one_rank_cannot_write, tmp_path)
    assert first == second == ""
    assert own == "OSError: [Errno 28] No space left on device"
    assert failed.startswith(
        f"FailedOnOtherRankError: cannot save the model in {tmp_path}, since rank 1 failed: OSError"
    )
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names(tmp_path) == {*files, "model.safetensors.index.json"}
    torch.manual_seed(0)
    found = load_file(tmp_path / files[0]) | load_file(tmp_path / files[1])
    for name, value in Two().state_dict().items():
        assert torch.equal(found[name], value), name


def lazy(num_bytes: int, *sources: str) -> LazyTensor:
    def copy_part(*args: Any) -> None:
        raise AssertionError("nothing is read for a plan")

    return LazyTensor(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), copy_part, frozenset(sources))


def test_each_stage_has_files_of_its_own_of_no_more_than_the_given_size() -> None:
    stored = {"a": lazy(4, "a"), "x": lazy(4, "x"), "b": lazy(4, "b"), "big": lazy(30, "b"), "c": lazy(8, "c")}
    files = plan_files(stored, {"a": 0, "b": 0, "c": 0, "x": 1}, 8)
    assert [(file.name, file.pipe, file.tensors) for file in files] == [
        ("model-00001-of-00004.safetensors", 0, ("a", "b")),
        ("model-00002-of-00004.safetensors", 0, ("big",)),
        ("model-00003-of-00004.safetensors", 0, ("c",)),
        ("model-00004-of-00004.safetensors", 1, ("x",)),
    ]


def test_parameters_of_several_stages_that_files_have_as_one_keep_their_own_names() -> None:
    whole = {name: lazy(4, name) for name in ("q", "k", "v", "out")}
    stored = {"qkv": lazy(8, "q", "k"), "vo": lazy(4, "v"), "out.weight": lazy(4, "out")}
    kept = without_crossing_stages(stored, whole, {"q": 0, "k": 1, "v": 1, "out": 1})
    assert kept == {"vo": stored["vo"], "out.weight": stored["out.weight"], "k": whole["k"], "q": whole["q"]}


@pytest.mark.parametrize(
    ("given", "expected"), [(7, 7), ("20KB", 20_000), ("5 GB", 5 * 10**9), ("1.5MiB", 3 * 2**19), ("12b", 12)]
)
def test_sizes_are_bytes_or_have_a_unit(given: int | str, expected: int) -> None:
    assert parse_num_bytes(given) == expected


@pytest.mark.parametrize("given", [0, -1, "5", "GB", "5 apples"])
def test_other_sizes_are_an_error(given: int | str) -> None:
    with pytest.raises(InvalidOptionError, match=r"max_shard_size.*a positive number of bytes"):
        parse_num_bytes(given)


def test_only_distributed_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(PlainModelError, match=r"fxpar.save_pretrained expected a model that fxpar.distribute"):
        fxpar.save_pretrained(nn.Linear(2, 2), tmp_path)
