"""Models of equal layers, or of layers that differ in some way, with how many of them are copies in a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from tests.support.small_models import GPT, hf_gemma, hf_gpt2, hf_llama, labelled, tokens

LAYERS = 5
CALLS = [0]


class Layer(nn.Module):
    """A layer with a buffer that changes, dropout, and an option that a forward reads."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.scale, self.calls = number, 2.0, 0
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.full((8,), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.norm(self.linear(x) + self.shift), 0.1) * self.scale


class InPlace(Layer):
    """Changes its own values, of which it reads a view afterwards, and returns a view of one that it also uses."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        view = hidden.view(2, -1)
        hidden.add_(1.0)
        F.relu(hidden, inplace=True)
        return view.view(-1, 8), hidden * 2


class InPlaceOfParts(Layer):
    """Takes its values apart, and sets a part of them to what it computes of these parts."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        one, other = hidden[1:].view(-1, 2, 4).unbind(1)
        hidden[1:] = torch.cat([other, -one], dim=1)
        return hidden


class Numbered(Layer):
    """Reads a number that differs from layer to layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.number


class Counting(Layer):
    """Counts the calls of all layers in an object from outside of them."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return x + self.linear(x) * CALLS[0]


class CountingItself(Layer):
    """Keeps a number on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x + self.linear(x)


class Reading(Layer):
    """Reads what the model stores between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * STATE.value


class Appending(Layer):
    """Appends to a list that the model makes anew for each forward, and keeps where all may find it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        STATE.made["sums"].append(x.sum())
        return x


class ReadingOfMade(Layer):
    """Reads what the model keeps in a dict that it makes anew for each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * STATE.made["number"]


class ReadingOfOther(Layer):
    """Reads what the model keeps in an object that it makes anew for each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * STATE.made["other"].value


class Leaving(Layer):
    """Turns gradients off for those behind it, if they are on."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return x + self.linear(x)


class Asking(Layer):
    """Asks a function that the model makes anew for each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * STATE.made()


class Listing(Layer):
    """Reads all its parameters, of which one layer has fewer."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number == 3:
            self.linear.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.linear.weight) * torch.stack([p.sum() for p in self.linear.parameters()]).sum()


class Activated(Layer):
    """Has a function of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.activation = lambda hidden: hidden * number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x))


class State:
    value = 1.0
    made: Any = None


STATE = State()


class Chain(nn.Module):
    """Layers one after another."""

    def __init__(self, layer: type[Layer] = Layer, *, stores: bool = False) -> None:
        super().__init__()
        self.layers, self.stores = nn.ModuleList(layer(number) for number in range(LAYERS)), stores

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for number, layer in enumerate(self.layers):
            if self.stores:
                STATE.value = float(number)
            returned = layer(x)
            x, other = returned if isinstance(returned, tuple) else (returned, returned)
            total = total + other.sum()
        return total + x.square().mean()


class Keeping(Chain):
    """Keeps in a dict that it makes: the number of the layer that it calls, and what layers add."""

    def forward(self, x: Tensor) -> Tensor:
        STATE.made = made = {"sums": [], "number": 0, "other": State()} if self.stores else {"sums": [], "number": 0}
        for number, layer in enumerate(self.layers):
            made["number"] = number if isinstance(layer, ReadingOfMade) else 0
            if self.stores:
                made["other"].value = float(number)
            x = layer(x)
        total = torch.stack([x.sum(), *made["sums"]]).sum()
        STATE.made = None
        return total


class Counted(Chain):
    """Counts calls of its layers by a function or an iterator that it makes."""

    def forward(self, x: Tensor) -> Tensor:
        number = 0

        def count() -> int:
            nonlocal number
            number += 1
            return number

        numbers = iter([1.0, 2.0, 3.0, 4.0, 5.0])
        STATE.made = numbers.__next__ if self.stores else count
        for layer in self.layers:
            x = layer(x)
        STATE.made = None
        return x.square().mean()


class Replacing(Chain):
    """Calls some layers with other tensors in the place of their parameters."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number % 2 == 0:
                x = layer(x)
            else:
                others = {name: parameter * number for name, parameter in layer.named_parameters()}
                x = functional_call(layer, others, (x,))
        return x.square().mean()


class Mapped(Chain):
    """Calls its layers in a transform of `torch.func`."""

    def forward(self, x: Tensor) -> Tensor:
        def rows_of(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        return vmap(rows_of)(x[:, None]).square().mean()


class InModes(Chain):
    """Calls its last layers in another mode."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            last = number > 1
            if self.stores:
                with torch.autocast("cpu", torch.bfloat16, enabled=last):
                    x = layer(x).float()
            else:
                with torch.set_grad_enabled(last):
                    x = layer(x)
        return x.square().mean()


def in_modes(*, stores: bool = False) -> Callable[[], nn.Module]:
    return lambda: InModes(stores=stores)


def keeping(layer: type[Layer], *, stores: bool = False) -> Callable[[], nn.Module]:
    return lambda: Keeping(layer, stores=stores)


def chain(change: Callable[[Chain], Any] = lambda model: None, **options: Any) -> Chain:
    model = Chain(**options)
    change(model)
    return model


def tie(model: Chain) -> None:
    model.layers[3].linear.weight = model.layers[1].linear.weight


def hook(model: Chain) -> None:
    model.layers[2].register_forward_hook(lambda module, args, output: output * 3)


def hook_by_number(model: Chain) -> None:
    def scale_by(number: int) -> Callable[..., Any]:
        return lambda module, args, output: output * number

    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(scale_by(number))


def rescale(model: Chain) -> None:
    model.layers[2].scale = 5.0


def freeze(model: Chain) -> None:
    for layer in model.layers[:2]:
        layer.requires_grad_(False)


def rows() -> tuple[Tensor]:
    return (torch.randn(4, 8),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int]] = {
    "gpt": (lambda: GPT(layers=LAYERS), lambda: (tokens(), tokens()), LAYERS - 1),
    "gpt2": (lambda: hf_gpt2(layers=LAYERS, dropout=0.1), labelled, LAYERS - 1),
    "llama": (lambda: hf_llama(layers=LAYERS), labelled, LAYERS - 1),
    "gemma": (lambda: hf_gemma(layers=6), labelled, 5),  # masks are arguments
    "chain": (chain, rows, LAYERS - 2),  # the first one's input requires no gradient
    "tied": (lambda: chain(tie), rows, LAYERS - 2),
    "in place": (lambda: chain(layer=InPlace), rows, LAYERS - 2),
    "parts in place": (lambda: chain(layer=InPlaceOfParts), rows, LAYERS - 2),
    "half frozen": (lambda: chain(freeze), rows, 2),
    "one has a hook": (lambda: chain(hook), rows, LAYERS - 3),
    "hooks with numbers of their own": (lambda: chain(hook_by_number), rows, 0),
    "functions of their own": (lambda: chain(layer=Activated), rows, 0),
    "a function that counts": (lambda: Counted(Asking), rows, 0),
    "an iterator": (lambda: Counted(Asking, stores=True), rows, 0),
    "one differs": (lambda: chain(rescale), rows, LAYERS - 3),
    "numbered": (lambda: chain(layer=Numbered), rows, 0),
    "counting": (lambda: chain(layer=Counting), rows, 0),
    "counting itself": (lambda: chain(layer=CountingItself), rows, 0),
    "stored between": (lambda: chain(layer=Reading, stores=True), rows, 0),
    "without grad, then with it": (in_modes(), rows, LAYERS - 3),
    "autocast off, then on": (in_modes(stores=True), rows, LAYERS - 3),
    "modes that layers change": (lambda: chain(layer=Leaving), rows, 0),
    "listing": (lambda: chain(layer=Listing), rows, 0),
    "some with others in place": (Replacing, rows, 1),
    "within a transform": (lambda: Mapped(Numbered), rows, 0),
    "kept, not read": (keeping(Layer), rows, LAYERS - 2),
    "appended to a new list": (keeping(Appending), rows, 0),
    "kept in a new dict": (keeping(ReadingOfMade), rows, 0),
    "kept in a new object": (keeping(ReadingOfOther, stores=True), rows, 0),
}
"""Each with its inputs, and the number of layers that are copies."""
