"""load_pretrained: every rank has its slices of what the files hold, or an error that says what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxpar
from fxpar import errors
from fxpar.ir.dtensor import layout_of
from fxpar.ir.tiles import shard_of
from fxpar.world.launch import run_ranks
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.pretrained import Two, load_where_one_rank_has_no_folder
from tests.support.small_models import hf_llama, hf_mixtral

ROWS = torch.zeros(8, 6)


class Net(nn.Module):
    """A fused weight, uneven ones, a tied one, and buffers that are saved and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.odd, self.scale = nn.Linear(6, 24), nn.Linear(24, 7), nn.Parameter(torch.tensor(1.5))
        self.first, self.last = nn.Linear(7, 7, bias=False), nn.Linear(7, 7)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(7.0))
        self.register_buffer("unsaved", torch.ones(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(self.qkv(x)) * self.table * self.unsaved
        return self.last(self.first(x)).square().mean() * self.scale


HINTS = {"qkv.weight": (fxpar.Grouped(3, "x"), "y"), "odd.weight": ("x", None), "first.weight": ("x", "y")}


def values() -> dict[str, Tensor]:
    """Other values for the state dict of `Net` than it has."""
    torch.manual_seed(1)
    return {name: torch.randn_like(value) for name, value in Net().state_dict().items() if name != "last.weight"}


def net(mesh: fxpar.Mesh, **kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        model = Net()
    return fxpar.distribute(
        model,
        mesh,
        layouts=HINTS if mesh.num_ranks > 1 else None,
        init_weights=lambda module: module.unsaved.fill_(1) if isinstance(module, Net) else None,
        **kwargs,
    )


def check_own_part(name: str, held: Tensor, whole: Tensor, mesh: fxpar.Mesh) -> None:
    """Check that `held` is this rank's part of `whole`."""
    if isinstance(held, DTensor):
        whole, held = shard_of(whole, layout_of(held), mesh.coordinate), held.to_local()
    assert torch.equal(held.detach(), whole), name


@pytest.mark.parametrize("rank", range(16))
def test_each_rank_has_its_part_of_fused_uneven_and_tied_weights_and_buffers(rank: int, tmp_path: Path) -> None:
    expected = values()
    save_file(expected, tmp_path / "model.safetensors")
    with fake_mesh(pipe=2, z=2, y=2, x=2) as mesh:
        mesh = as_rank(mesh, rank)
        model = net(mesh, stages=["odd"], example_inputs=(ROWS,))
        fxpar.load_pretrained(torch.compile(model, backend="fxpar"), tmp_path)
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name in held.keys() & expected.keys():
            check_own_part(name, held[name], expected[name], mesh)
        assert held.keys() & {"qkv.weight", "odd.weight"} == ({"odd.weight"} if rank >= 8 else {"qkv.weight"})
        assert model.unsaved.tolist() == [1.0] * 7


@pytest.mark.parametrize("names", [["first.weight"], ["last.weight"], ["first.weight", "last.weight"]])
def test_a_tied_weight_may_be_stored_under_any_of_its_names(names: list[str], tmp_path: Path) -> None:
    expected = values()
    tied = expected.pop("first.weight")
    save_file(expected | {name: tied.clone() for name in names}, tmp_path / "model.safetensors")
    with fake_mesh(x=2) as mesh:
        model = net(mesh)
        fxpar.load_pretrained(model, tmp_path)
        check_own_part("first.weight", model.first.weight, tied, mesh)
        assert model.last.weight is model.first.weight


def test_values_are_converted_to_the_dtypes_of_the_model(tmp_path: Path) -> None:
    expected = {name: value.bfloat16() for name, value in values().items()}
    save_file(expected, tmp_path / "model.safetensors")
    with fake_mesh(x=2) as mesh:
        model = net(mesh)
        fxpar.load_pretrained(model, tmp_path)
        for name, held in model.named_parameters():
            assert held.dtype == torch.float32
            check_own_part(name, held, expected[name].float(), mesh)


def load_into(build: Callable[[], nn.Module], folder: Path) -> dict[str, Tensor]:
    """The whole parameters of a distributed model that had 7 everywhere before it loaded the folder."""
    model = build()
    nn.utils.vector_to_parameters(torch.full([sum(p.numel() for p in model.parameters())], 7.0), model.parameters())
    with fake_mesh() as mesh:
        fxpar.distribute(model, mesh)
        fxpar.load_pretrained(model, folder)
        return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def test_a_model_with_a_head_loads_its_base_model_and_a_base_model_drops_the_head(tmp_path: Path) -> None:
    whole = hf_llama()
    whole.config.tie_word_embeddings = True
    whole.tie_weights()
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")
    assert "embed_tokens.weight" in load_file(tmp_path / "base" / "model.safetensors")
    for folder, cls in (("base", transformers.LlamaForCausalLM), ("whole", transformers.LlamaModel)):
        found = load_into(lambda cls=cls: cls(whole.config), tmp_path / folder)
        expected = whole if folder == "base" else whole.model
        for name, parameter in expected.named_parameters():
            assert torch.equal(found[name], parameter), f"{folder}: {name}"


@pytest.mark.parametrize("axes", [("x", None, None), (None, "x", None), (None, fxpar.Grouped(2, "x"), None)])
def test_experts_that_are_stored_one_by_one_become_shards_of_one_parameter(axes: Any, tmp_path: Path) -> None:
    whole = hf_mixtral()
    whole.save_pretrained(tmp_path)
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in load_file(tmp_path / "model.safetensors")
    for rank in range(2):
        with fake_mesh(x=2) as mesh:
            mesh, model = as_rank(mesh, rank), hf_mixtral()
            fxpar.distribute(model, mesh, layouts={"*experts.gate_up_proj": axes})
            fxpar.load_pretrained(model, tmp_path)
            expected = dict(whole.named_parameters())
            for name, held in model.named_parameters():
                check_own_part(name, held, expected[name], mesh)


def write_values(folder: Path, **replaced: Tensor | None) -> None:
    """Files of `Net` with other tensors in place of some, or without them; dots in names are double underscores."""
    changes = {name.replace("__", "."): value for name, value in replaced.items()}
    kept = {name: value for name, value in {**values(), **changes}.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def truncate(folder: Path) -> None:
    write_values(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def write_another_architecture(folder: Path) -> None:
    save_file({f"h.{layer}.weight": torch.zeros(2) for layer in range(9)}, folder / "model.safetensors")


def write_shard_without_its_tensor(folder: Path) -> None:
    save_file({"other": torch.zeros(2)}, folder / "a.safetensors")
    write_index(folder, {"first.weight": "a.safetensors"})


WRONG: dict[str, tuple[Callable[[Path], Any], type[errors.FxparError], str]] = {
    "no files": (
        lambda folder: (folder / "pytorch_model.bin").touch(),
        errors.WeightFilesError,
        r"expected model.safetensors or model.safetensors.index.json, found pytorch_model.bin; convert weights",
    ),
    "missing file": (
        lambda folder: write_index(folder, {"first.weight": "a.safetensors", "odd.bias": "b.safetensors"}),
        errors.WeightFilesError,
        r"index.json: names 2 files, but 2 of them are not there: a.safetensors, b.safetensors; copy or download",
    ),
    "no index": (
        lambda folder: write_index(folder, 3),
        errors.WeightFilesError,
        "expected JSON with a weight_map, but",
    ),
    "other tensors": (
        write_shard_without_its_tensor,
        errors.WeightFilesError,
        r"a.safetensors: expected the tensor first.weight here, as model.safetensors.index.json says",
    ),
    "truncated": (
        truncate,
        errors.WeightFilesError,
        r"model.safetensors: is truncated or no safetensors file \(.*\); d",
    ),
    "garbage": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"garbage" * 9),
        errors.WeightFilesError,
        "is truncated or no safetensors file",
    ),
    "missing tensors": (
        lambda folder: write_values(folder, odd__bias=None, table=None),
        errors.MissingWeightsError,
        r"expected values for 8 parameters and buffers, but 2 are not there: odd.bias, table; .*strict=False",
    ),
    "other shape": (
        lambda folder: write_values(folder, odd__bias=torch.zeros(8)),
        errors.WeightMismatchError,
        r"1 tensors do not fit the model: odd.bias \(expected float32 \[7\], found float32 \[8\]\); build the model",
    ),
    "quantized": (
        lambda folder: write_values(folder, odd__bias=torch.zeros(7).to(torch.float8_e4m3fn)),
        errors.WeightMismatchError,
        r"odd.bias \(expected float32 \[7\], found float8_e4m3fn \[7\]\); .*convert quantized",
    ),
    "other architecture": (
        write_another_architecture,
        errors.OtherArchitectureError,
        r"expected the weights of Net.* 8 parameters are not there \(scale, qkv.weight, qkv.bias and 5 more\), and 9 "
        r"tensors have no place in the model \(h.0.weight, h.1.weight, h.2.weight and 6 more\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_files_is_an_error_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    write, error, message = WRONG[name]
    write(tmp_path)
    with fake_mesh() as mesh:
        model = net(mesh)
        with pytest.raises(error, match=message):
            fxpar.load_pretrained(model, tmp_path)


def test_tensors_that_do_not_fit_a_conversion_are_an_error(tmp_path: Path) -> None:
    hf_mixtral().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        errors.WeightFilesError, match=r"4 tensors \(.*\) cannot be converted to .*down_proj: stack expec"
    ):
        load_into(hf_mixtral, tmp_path)


def test_without_strict_what_is_missing_stays_as_it_is_and_what_is_not_known_is_warned_of(tmp_path: Path) -> None:
    write_values(tmp_path, odd__bias=None, extra=torch.zeros(2))
    with fake_mesh() as mesh:
        model = net(mesh)
        with pytest.warns(UserWarning, match="1 tensors have no place in the model: extra"):
            fxpar.load_pretrained(model, tmp_path, strict=False)
        check_own_part("odd.weight", model.odd.weight, values()["odd.weight"], mesh)
        assert model.odd.bias.to_local().isnan().all()
        with pytest.raises(errors.NotLoadedError, match=r"no values yet for odd.bias"):
            model(ROWS)


def test_only_distributed_models_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        errors.PlainModelError, match=r"fxpar.load_pretrained expected a model that fxpar.distribute has"
    ):
        fxpar.load_pretrained(Net(), tmp_path)


def test_safetensors_is_needed_for_this_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpar.model.pretrained.stored_tensors.find_spec", lambda name: None)
    write_values(tmp_path)
    with fake_mesh() as mesh, pytest.raises(errors.MissingPackageError, match="pip install safetensors"):
        fxpar.load_pretrained(net(mesh), tmp_path)


def test_where_one_rank_cannot_load_all_raise(tmp_path: Path) -> None:
    save_file(Two().state_dict(), tmp_path / "model.safetensors")
    found = run_ranks(2, load_where_one_rank_has_no_folder, tmp_path)
    assert found[0].startswith(f"FailedOnOtherRankError: cannot load the weights in {tmp_path}, since rank 1 failed: ")
    assert found[1].startswith("WeightFilesError: ") and "found no files" in found[1]
