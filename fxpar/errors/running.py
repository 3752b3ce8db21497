"""What can go wrong while ranks run together."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors.base import FxparError


class PlanMismatchError(FxparError):
    """Ranks derived different plans; raised before the first collective, so nothing hangs."""


class UnevenCallsError(FxparError):
    """Ranks make different calls: with arguments of different shapes, or one evaluates where another trains."""

    def __init__(self, one_does: str, other: int, other_runs: str) -> None:
        super().__init__(
            f"{one_does}, but rank {other} runs {other_runs}: expected the same calls on all ranks, with arguments of "
            "the same shapes; evaluate on all ranks, and let the sampler give every batch shard as many rows "
            "(DistributedSampler does), or leave out the last batch (drop_last=True)"
        )


class InputMismatchError(FxparError):
    """Ranks that work on the same batch shard were given different inputs."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(
            f"ranks that differ only along the axes pipe, y and x must be given the same inputs, but argument "
            f"{'; argument '.join(problems)}. Each of them reads the batch shard of its place on data and z: "
            "DistributedSampler(dataset, num_replicas=fxpar.num_batch_shards(mesh), rank=fxpar.batch_rank(mesh)), with "
            'one seed on all ranks wherever data are shuffled or augmented. options={"check_inputs": False} turns this '
            "check off, for inputs that differ by rounding alone"
        )


class NoRecordedStepError(FxparError):
    """Figures of a step were asked for, and none was recorded."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"no step of {model} was recorded on this rank: expected one within `with fxpar.record_steps(model):`, or "
            'with options={"timeline": ...}, before `fxpar.step_stats(model)`, on all ranks'
        )


class NotTheLossError(FxparError):
    """A backward reached a result of the forward that is not its loss, and cannot be differentiated."""

    def __init__(self, result: str, loss: str | None = None) -> None:
        why = (
            "it is not known how those of parts of the batch make it up"
            if loss is None
            else f"expected a backward through the loss alone, which is {loss}, since a step computes the gradients of "
            "its loss before it returns"
        )
        plain = (
            "" if loss is None else ', or compile with options={"results": "local"}, with which the forward runs twice'
        )
        super().__init__(
            f"{result} has no gradient: {why}. Add up inside the forward what is to be differentiated, and return the "
            f'sum as the loss (under the name "loss", or as the first scalar){plain}; detach() what is only to be '
            "looked at"
        )


class SecondDerivativeError(FxparError):
    """The gradients of a step were to be differentiated."""

    def __init__(self) -> None:
        super().__init__(
            "a backward through a distributed model was called with create_graph=True, but its gradients cannot be "
            "differentiated again: expected create_graph=False; take a gradient that the loss depends on, such as that "
            "of a gradient penalty, inside the forward, by torch.autograd.grad(..., create_graph=True)"
        )


class RemoteResultError(FxparError):
    """The values of a result were used on a rank that does not hold them."""

    def __init__(self, result: str, ranks: Sequence[int]) -> None:
        held = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(
            f"{result} is held by {held}, of the last stage, and its values are not on this rank: use them there, or "
            'compile with options={"results": "all"}, by which every rank gets all results, or with "local", by which '
            "it gets what its own batch shard has, as plain tensors"
        )


class ReshardError(FxparError):
    """A tensor cannot be moved as asked between two meshes or layouts."""


class PeerLostError(FxparError):
    """A rank died or failed, or its connection broke, while a value was on its way."""

    def __init__(self, value: str, peer: int | None, reason: str) -> None:
        self.peer, self.reason = peer, reason
        lost = "another rank" if peer is None else f"rank {peer}"
        super().__init__(f"lost {lost} while moving {value}: {reason}; look at that rank's own output")


class LostInCollectiveError(PeerLostError):
    """A rank was lost in a collective, which does not know what it moves: `naming_lost_peers` does."""


class BrokenWorldError(FxparError):
    """A step is to run after one that failed on the same rank, in which other ranks may still be."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"an earlier step failed on this rank ({reason}), and what other ranks send for it may still arrive: "
            "expected a world in which all steps ended; start all ranks again, or let each of them destroy its process "
            "group, form it anew, and call init_mesh and distribute once more"
        )


class SharedMemoryError(FxparError):
    """Memory that the ranks of one host share cannot be had."""

    def __init__(self, asked: str, reason: str) -> None:
        super().__init__(
            f"cannot {asked} of the memory that ranks of one host share: {reason}; use less memory on this host, or "
            "give each rank an FXPAR_HOST of its own, so that they exchange data through the network"
        )


class CoreNotBuiltError(FxparError):
    """The native core's shared library is missing, cannot be loaded, or is older than the Python code."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"expected fxpar's native core at {path}, but {reason}; build it with `make install` "
            "(or `pip install -e .`), which needs a C++ compiler"
        )


class FailedOnOtherRankError(FxparError):
    """What all ranks do together failed on another one."""

    def __init__(self, work: str, rank: int, problem: str) -> None:
        super().__init__(f"cannot {work}, since rank {rank} failed: {problem}")
