"""Random parts of forwards, with branches on values of tensors, nested, in loops, with and without another side."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

CONDITIONS = [
    *("ones.any()", "not twos.any()", "ones.sum() > 2", "places.numel() > 0", "len(places) == 0"),
    *("kinds.sum() > 6", "kinds.min() == 0", "(kinds == 1).all()", "(h > 0).all()", "(h.abs() < 1.2).all()"),
    *("ones.any() and twos.any()", "kinds.max() > 1 or ones.all()"),
]

STATEMENTS = [
    *("h = h * 2", "h = model.other(h)", "h = h.clamp(min=-0.5)", "h = h.detach() + g", "h = -h; h[twos] = 0.1"),
    *("g = h + 1", "g = g + h", "g = torch.zeros_like(h)", "g = h", "h = g", "h = torch.where(ones[:, None], h, g)"),
    *("h += 1", "h.mul_(0.5)", "h[0] += 1", "g.copy_(h)", "g.masked_fill_(twos[:, None], 0.7)"),
    *("view = h[:4]; view += 1", "view = h.t(); view.mul_(2)"),
    *("h[ones] = model.other(h[ones])", "h[twos] += 1.5", "h[ones] = 0.3", "g[twos] = h[twos]"),
    *("h[places] = g[places]", "h.index_add_(0, places, g[places])"),
    *("h = h + h[ones].square().sum()", "h = h + h[ones].mean()", "ones = kinds > 1", "twos = ~ones"),
]


def program(seed: int) -> str:
    """The source of a function `part(model, h, kinds)`, of hidden states (rows, width) and a number for each row."""
    random = Random(seed)
    first = ["ones, twos = kinds == 1, kinds == 2", "places = torch.where(ones)[0]", "g = h * 1.5"]
    body = [*first, *_block(random, random.randint(2, 4), 0), f"return {random.choice(['h', 'g', 'h + g', 'None'])}"]
    return "\n".join(["import torch", "", "", "def part(model, h, kinds):", *(f"    {line}" for line in body), ""])


def _block(random: Random, count: int, depth: int) -> Iterator[str]:
    for _ in range(count):
        kind = random.random()
        if kind < 0.4 and depth < 3:
            yield f"if {random.choice(CONDITIONS)}:"
            yield from _indented(random, depth)
            if random.random() < 0.4:
                yield random.choice(["else:", f"elif {random.choice(CONDITIONS)}:"])
                yield from _indented(random, depth)
        elif kind < 0.47 and depth < 2:
            yield "for _ in range(2):"
            yield f"    if {random.choice(CONDITIONS)}:"
            yield "        continue"
            yield from _indented(random, depth)
        elif kind < 0.51:
            yield f"if {random.choice(CONDITIONS)}:"
            yield f"    return {random.choice(['h', 'g', 'h * 2'])}"
        else:
            yield random.choice(STATEMENTS)


def _indented(random: Random, depth: int) -> Iterator[str]:
    yield from (f"    {line}" for line in _block(random, random.randint(1, 2), depth + 1))
