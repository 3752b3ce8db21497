"""What can be wrong in the input of tools, such as clusters, costs, traces and reports, and in what is installed."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors.base import FxparError, one_of


class InvalidCostsError(FxparError):
    """What a schedule is simulated with is incomplete, unreadable, or contradicts itself."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"costs: {problem}; {remedy}")


class InvalidTimelineError(FxparError):
    """A file is no trace that fxpar has written."""

    def __init__(self, path: str, reason: object) -> None:
        super().__init__(
            f"expected a trace in {path} as `fxpar simulate --trace` or a recorded step writes it, but: {reason!r}"
        )


class ClusterUnavailableError(FxparError):
    """Hosts cannot be emulated on this machine, or not by this user."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"expected to make network namespaces with rate-limited links, but {reason}; this needs Linux with veth, "
            "bridge and htb, the commands `ip` and `tc` (package iproute2), and root (CAP_SYS_ADMIN, CAP_NET_ADMIN)"
        )


class UnreadableReportError(FxparError):
    """A file is not what a benchmark wrote."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"{path}: expected what `fxpar bench NAME --json` prints, found {problem}; write one file per run: "
            "`fxpar bench NAME --json > FILE`"
        )


class NoFactsError(FxparError):
    """A folder has no dump that a report could be made of."""

    def __init__(self, where: str, found: str) -> None:
        super().__init__(
            f"{where}: expected the dump of a training step by this release, found {found}; compile the model with "
            'options={"dump": FOLDER}, and call it with gradients'
        )


class InvalidClusterError(FxparError):
    """A description of a cluster lacks a figure, or has one that cannot be."""

    def __init__(self, where: str, figure: str, expected: str, found: object) -> None:
        what = "nothing" if found is None else repr(found)
        super().__init__(
            f"{where}: {figure}: expected {expected}, found {what}; `fxpar calibrate` writes complete cluster files"
        )


class UnknownClusterError(FxparError):
    """The name is not one of a cluster that comes with fxpar."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown cluster {found!r}: {one_of(expected, found)}; the name of a file ends in .json")


class PlanningError(FxparError):
    """A plan cannot be searched for, or there is none."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"plan: {problem}; {remedy}")


class ExplainingError(FxparError):
    """What `explain` is given is not enough, or does not go together."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"explain: {problem}; {remedy}")


class ModelFunctionError(FxparError):
    """The function that is to return a model for the command line is not there, or returns something else."""

    def __init__(self, name: str, problem: object) -> None:
        super().__init__(
            f"expected a function MODULE:FUNCTION (or FILE.py:FUNCTION) that returns (model, batch) or (model, batch, "
            f"settings), found {name!r}: {problem}; the batch is a tuple or a dict of the forward's arguments"
        )


class MissingPackageError(FxparError):
    """A package that fxpar needs for this alone is not installed."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(
            f"expected the package {package}, which {purpose}, but it is not installed: pip install {package}"
        )
