"""Language models of transformers with peft's low-rank adapters on their frozen weights."""

from __future__ import annotations

from torch import nn

from tests.support.small_models import hf_gpt2, hf_llama


def llama_with_adapters(layers: int) -> nn.Module:
    """Llama with adapters on attention and MLP, and a copy of its head that is trained as a whole."""
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return with_adapters(hf_llama(layers=layers), targets, trained=["lm_head"])


def gpt2_with_adapters(layers: int) -> nn.Module:
    """GPT-2 with adapters on all matrices of its layers, which are stored transposed."""
    return with_adapters(hf_gpt2(layers=layers), ["c_attn", "c_proj", "c_fc"], transposed=True)


def with_adapters(
    model: nn.Module, targets: list[str], *, trained: list[str] | None = None, transposed: bool = False
) -> nn.Module:
    """`model`, frozen, with adapters of rank 4 on the modules called `targets`; copies of `trained` have gradients."""
    import peft  # takes long, and few tests need it

    config = peft.LoraConfig(
        r=4,
        target_modules=targets,
        modules_to_save=trained,
        fan_in_fan_out=transposed,
        init_lora_weights=False,  # otherwise the second factor starts as zero, and gradients of the first are zero
    )
    return peft.get_peft_model(model, config)
