"""The gradients of a forward's results as inputs of a step, for a script that computes its loss of these results."""

from __future__ import annotations

from dataclasses import dataclass

_NAME = "gradient_of_result_"


@dataclass(frozen=True, slots=True)
class ResultGradient:
    """How the gradient of a result enters a step.

    position: of the result.
    argument: of the gradient among the arguments of the step.
    batch_dim: the dim of its samples, of which the gradient has those of a batch shard; None if it has none.
    """

    position: int
    argument: int
    batch_dim: int | None


def gradient_name(position: int) -> str:
    """The name of the input that is the gradient of this result."""
    return f"{_NAME}{position}"


def result_of(name: str) -> int | None:
    """The position of the result whose gradient the input of this name is; None for other inputs."""
    return int(name.removeprefix(_NAME)) if name.startswith(_NAME) else None
