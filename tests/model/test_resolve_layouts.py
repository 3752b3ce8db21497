"""Hints come from the plan that a model ships, and from the user, whose hints are laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import fxpar
from fxpar.errors import HintNotFoundError, InvalidOptionError, NoShippedPlanError, UnknownStyleError
from fxpar.ir.hints import Grouped
from fxpar.model.logical_parameters import logical_parameters
from fxpar.model.resolve_layouts import Layouts, ResolvedLayouts, resolve_layouts
from tests.support.adapters import llama_with_adapters
from tests.support.fake_mesh import fake_mesh
from tests.support.small_models import GPT, hf_llama, hf_mixtral, labelled

Q, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"


def resolved(model: nn.Module, layouts: Layouts = None, x: int = 2) -> ResolvedLayouts:
    """The hints for a model on a mesh with so many ranks along x."""
    with fake_mesh(x=x) as mesh:
        return resolve_layouts(layouts, model, logical_parameters(model), mesh)


def test_the_plan_of_a_transformers_model_is_read_where_there_is_an_x_axis() -> None:
    hints = resolved(hf_llama()).hints.parameters
    assert hints[Q] == ("x", None)
    assert hints[DOWN] == (None, "x")
    assert hints["model.embed_tokens.weight"] == hints["lm_head.weight"] == ("x", None)
    assert "model.norm.weight" not in hints
    assert resolved(hf_llama(), x=1).hints.parameters == {}


def test_a_plan_is_found_in_a_model_that_contains_another() -> None:
    class WithValueHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = hf_llama()
            self.value = nn.Linear(24, 1)

    found = resolved(WithValueHead())
    assert found.hints.parameters[f"language.{Q}"] == ("x", None)
    assert "tp_plan of language" in found.describe_plan()


def test_a_plan_means_what_adapters_wrap() -> None:
    found = resolved(llama_with_adapters(layers=1))
    assert "names no parameter or module" not in found.describe_plan()
    start = "base_model.model."
    sharded = {name.removeprefix(start): hint for name, hint in found.hints.parameters.items()}
    assert sharded["model.layers.0.self_attn.q_proj.base_layer.weight"] == ("x", None)
    assert sharded["model.layers.0.mlp.down_proj.base_layer.weight"] == (None, "x")
    assert sharded["lm_head.modules_to_save.default.weight"] == ("x", None)
    assert not [name for name in sharded if "lora" in name], "they are left to the search"


def test_users_hints_are_laid_over_the_plan_whatever_their_order() -> None:
    model = hf_llama()
    found = resolved(model, {"*.q_proj.weight": (None, "x"), Q: (None, None), "*.down_proj.weight": ("x", None)})
    assert found.hints.parameters[Q] == (None, None)
    assert found.hints.parameters[Q.replace("1", "0", 1)] == (None, "x")
    assert found.hints.parameters[DOWN] == ("x", None)
    assert found.hints.parameters["model.layers.0.mlp.up_proj.weight"] == ("x", None), "of the plan"
    lines = found.describe_plan().splitlines()
    assert any("self_attn.q_proj" in line and line.endswith("overridden by `layouts` for 2") for line in lines)
    assert any("mlp.up_proj" in line and line.endswith("used") for line in lines)


def test_the_pipeline_plan_is_shown_beside_what_decides_the_stages() -> None:
    (layers,) = (line for line in resolved(hf_llama()).describe_plan().splitlines() if line.startswith("model.layers "))
    assert "hidden_states, attention_mask -> hidden_states" in layers
    assert layers.endswith("stages are balanced, or as `stages` says")


def test_search_ignores_the_plan_and_plan_demands_one() -> None:
    assert resolved(hf_llama(), "search").hints.parameters == {}
    assert resolved(hf_llama(), "plan", x=1).hints.parameters[Q] == ("x", None)
    with pytest.raises(NoShippedPlanError, match=r"expected GPT or a module of it to ship .* but it has none; leave"):
        resolved(GPT(), "plan")
    with pytest.raises(InvalidOptionError, match="layouts"):
        resolved(GPT(), cast(Any, "auto"))
    assert resolved(GPT()).hints.parameters == {}


def test_experts_are_sharded_by_the_tensor_parallel_plan_and_left_to_the_search_by_the_expert_plan() -> None:
    model = hf_mixtral()
    up = "model.layers.0.mlp.experts.gate_up_proj"
    found = resolved(model)
    assert found.hints.parameters[up] == (None, Grouped(2, "x"), None)
    assert "other entries say how these parameters are sharded" in found.describe_plan()
    assert "names no parameter or module" not in found.describe_plan()
    cast(Any, model)._tp_plan = {}
    cast(Any, model.model)._tp_plan = {}
    found = resolved(model)
    assert found.hints.parameters == {}
    assert "leaves the layouts of its parameters to the search" in found.describe_plan()


def test_a_plan_that_names_what_is_not_there_shows_it_and_one_that_shards_nothing_is_no_plan() -> None:
    model = GPT()
    shipped: Mapping[str, str] = {"decoder.*.up": "colwise"}
    model.tp_plan = shipped
    assert "names no parameter or module of this model" in resolved(model).describe_plan()
    with pytest.raises(NoShippedPlanError, match="its plan shards nothing here: names no parameter or module"):
        resolved(model, "plan")


def test_an_unknown_style_in_a_plan_is_an_error() -> None:
    model = GPT()
    model.tp_plan = {"blocks.*.up": "diagonal"}
    with pytest.raises(UnknownStyleError, match=r"style 'diagonal' for 'blocks.\*.up' of tp_plan"):
        resolved(model)
    assert resolved(model, "search").hints.parameters == {}


def test_groups_that_do_not_divide_are_left_to_the_search() -> None:
    model = GPT(width=24)
    model.tp_plan = {"blocks.*.up": "packed_colwise"}
    assert resolved(model, x=2).hints.parameters["blocks.0.up.weight"] == (Grouped(2, "x"), None)
    found = resolved(model, x=5)
    assert found.hints.parameters == {}
    assert "the groups of blocks.1.up.bias, (96,), do not divide by 5" in found.describe_plan()


def test_styles_in_layouts_are_for_modules_or_parameters() -> None:
    found = resolved(GPT(), {"blocks.*.up": ColwiseParallel(), "blocks.*.down": "rowwise", "head": "colwise"})
    assert found.hints.parameters["blocks.1.up.weight"] == ("x", None)
    assert found.hints.parameters["blocks.1.up.bias"] == ("x",)
    assert found.hints.parameters["blocks.0.down.weight"] == (None, "x")
    assert found.hints.parameters["blocks.0.down.bias"] == (None,)
    with pytest.raises(HintNotFoundError, match=r"did you mean 'blocks\.0\.up'"):
        resolved(GPT(), {"blocks.0.upp": "colwise"})
    with pytest.raises(UnknownStyleError, match="of `layouts`"):
        resolved(GPT(), {"head": "diagonal"})


def test_the_plan_of_a_diffusers_model_with_packed_weights() -> None:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )
    hints = resolved(model).hints.parameters
    assert hints["transformer_blocks.0.attn.to_q.weight"] == ("x", None)
    assert hints["transformer_blocks.0.attn.to_out.0.weight"] == (None, "x")
    assert hints["transformer_blocks.0.attn.to_out.0.bias"] == (None,)
    assert hints["single_transformer_blocks.0.proj_out.weight"] == (None, Grouped(5, "x"))  # 1 of attention, 4 of MLP


def test_the_dump_says_what_became_of_the_plan(tmp_path: Path) -> None:
    with fake_mesh() as mesh:
        model = hf_llama(layers=1)
        fxpar.distribute(model, mesh, layouts="plan", example_inputs=labelled())
        torch.compile(model, backend="fxpar", options={"lowering": "aten", "dump": str(tmp_path)})(**labelled())
    lines = (tmp_path / "rank0" / "01_shipped_plan.txt").read_text().splitlines()
    assert lines[0].split() == ["key", "style", "from", "hint", "parameters", "verdict"]
    assert "model.layers.*.mlp.down_proj rowwise tp_plan (-, x) 1 used" in [" ".join(line.split()) for line in lines]
