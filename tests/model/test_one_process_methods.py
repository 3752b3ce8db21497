"""Methods that need the whole model say what to do instead; those that a model does not have are not added."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from fxpar.distribute_model import distribute
from fxpar.errors import OneProcessMethodError
from tests.support.fake_mesh import fake_mesh


class Generator(nn.Linear):
    """Has some of the methods that models of transformers have."""

    def generate(self, tokens: Tensor) -> Tensor:
        return tokens

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("would save the shards of this rank")


def test_a_distributed_model_says_what_to_do_in_place_of_methods_that_need_all_of_it() -> None:
    with fake_mesh() as mesh:
        model = distribute(nn.Sequential(Generator(4, 4)), mesh)
        with pytest.raises(
            OneProcessMethodError,
            match=r"^Generator.save_pretrained expected.*call fxpar.save_pretrained\(model, folder",
        ):
            model[0].save_pretrained("folder")
        with pytest.raises(OneProcessMethodError, match="load that folder in one process by from_pretrained"):
            model[0].generate(None)
        assert not hasattr(model[0], "push_to_hub")
        assert not hasattr(model, "generate")
