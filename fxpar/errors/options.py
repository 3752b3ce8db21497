"""What options, schedules and names can be wrong in."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors.base import FxparError, one_of


class UnknownOptionError(FxparError):
    """`torch.compile(..., options=...)` or `distribute` was given an option that does not exist."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown option {found!r}: {one_of(expected, found)}")


class InvalidOptionError(FxparError):
    """An option exists but its value does not fit."""

    def __init__(self, option: str, found: object, expected: str) -> None:
        super().__init__(f"option {option!r} is {found!r}: expected {expected}")


class ModeError(FxparError):
    """`torch.compile` was given a mode, which is one of Inductor."""

    def __init__(self, mode: str) -> None:
        super().__init__(
            f"mode {mode!r} is one of Inductor's: expected options={{...}} (see fxpar.config.Options); fxpar's kernels "
            "are Inductor's, and follow its settings, such as torch._inductor.config.max_autotune = True"
        )


class UnknownScheduleError(FxparError):
    """The schedule's name is not one that fxpar can build."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown schedule {found!r}: {one_of(expected, found)}")


class InvalidScheduleError(FxparError):
    """A schedule cannot be built, parsed, or run; the message marks the first wrong action."""


class UnknownLoweringError(FxparError):
    """The lowering's name is not one that fxpar has."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown lowering {found!r}: {one_of(expected, found)}")


class ForwardOnlyLoweringError(FxparError):
    """A step computes gradients, but its lowering has none."""

    def __init__(self, lowering: str) -> None:
        super().__init__(
            f"expected a call under torch.no_grad(), since the lowering {lowering!r} computes no gradients, but grad "
            'is enabled: evaluate under torch.no_grad(), and train by a torch.compile with the lowering "inductor"'
        )


class LoweringDeviceError(FxparError):
    """The lowering's code does not run on the devices of the mesh."""

    def __init__(self, lowering: str, expected: str, found: str) -> None:
        super().__init__(
            f"the lowering {lowering!r} expected a mesh of {expected} devices, but this one is of {found} devices: run "
            'on such devices, or take the lowering "inductor"'
        )


class UnknownStrategyError(FxparError):
    """The name is not one of a resharding strategy."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown resharding strategy {found!r}: {one_of(expected, found)}")


class UnknownAlgorithmError(FxparError):
    """The name is not one of an algorithm that orders transfers."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown algorithm {found!r}: {one_of(expected, found)}")


class MemoryBudgetError(FxparError):
    """A rank's program keeps more in memory at once than it may."""

    def __init__(self, found_mib: str, budget_mib: str, where: str, parts: str) -> None:
        super().__init__(
            f"{where}: {found_mib} MiB are in memory there: expected at most {budget_mib} MiB. In MiB: {parts}. "
            'Fewer microbatches in flight ("1f1b"), more stages, smaller microbatches or more shards need less'
        )
