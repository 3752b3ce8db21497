"""What can be wrong when the weights of a distributed model are read from files, or written to files."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors.base import FxparError, some_of


class WeightFilesError(FxparError):
    """A folder has no weights, or files of it are missing, damaged, or in an unknown form."""

    def __init__(self, where: object, problem: str, remedy: str) -> None:
        super().__init__(f"{where}: {problem}; {remedy}")


class OtherArchitectureError(FxparError):
    """Most of what files hold has no place in the model, and most of the model is not in the files."""

    def __init__(self, folder: object, model: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        super().__init__(
            f"{folder}: expected the weights of {model}, but found those of another architecture: {len(missing)} "
            f"parameters are not there ({some_of(missing, 3)}), and {len(unexpected)} tensors have no place in the "
            f"model ({some_of(unexpected, 3)}); build the model from the config in that folder, or load other weights"
        )


class MissingWeightsError(FxparError):
    """Some of the model's parameters or buffers are not in the files."""

    def __init__(self, folder: object, names: Sequence[str], num_expected: int) -> None:
        super().__init__(
            f"{folder}: expected values for {num_expected} parameters and buffers, but {len(names)} are not there: "
            f"{some_of(names)}; load a folder that has them, or pass strict=False, which leaves them as they are "
            "(such as a new head, initialised by init_weights of fxpar.distribute)"
        )


class WeightMismatchError(FxparError):
    """Tensors in the files do not have the shapes of the model's, or are quantized."""

    def __init__(self, folder: object, mismatches: Sequence[str]) -> None:
        super().__init__(
            f"{folder}: {len(mismatches)} tensors do not fit the model: {some_of(mismatches)}; build the model from "
            "the config of these weights, and convert quantized ones to bfloat16 first"
        )
