"""What messages call the arguments of a forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpar.model.argument_names import argument_names


class Net(nn.Module):
    def forward(self, tokens: Tensor, masks: Any, *more: Any, labels: Any = None, **options: Any) -> None: ...


def names(*args: Any, **kwargs: Any) -> list[str]:
    return argument_names(Net, pytree.tree_flatten((args, kwargs))[1])


def test_arguments_have_the_names_of_the_forward_and_of_what_contains_them() -> None:
    assert names(1, 2, 3, labels=4) == ["tokens", "masks", "argument 2", "labels"]
    assert names(1, masks={"a": [1, 2], "b": None}, extra=5) == [
        "tokens",
        "masks['a'][0]",
        "masks['a'][1]",
        "masks['b']",
        "extra",
    ]
    assert names() == []
