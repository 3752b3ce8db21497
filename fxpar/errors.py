"""Everything a user can get wrong, one class each: what was expected, what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class FxparError(Exception):
    """Base of every error that fxpar raises on purpose."""


def _one_of(expected: Sequence[str], found: str) -> str:
    close = get_close_matches(found, expected, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(map(repr, expected)) or '(nothing)'}{hint}"


class UnknownOptionError(FxparError):
    """`torch.compile(..., options=...)` or `distribute` was given an option that does not exist."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown option {found!r}: {_one_of(expected, found)}")


class InvalidOptionError(FxparError):
    """An option exists but its value does not fit."""

    def __init__(self, option: str, found: object, expected: str) -> None:
        super().__init__(f"option {option!r} is {found!r}: expected {expected}")


class UnknownScheduleError(FxparError):
    """The schedule's name is not one that fxpar can build."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown schedule {found!r}: {_one_of(expected, found)}")


class InvalidScheduleError(FxparError):
    """A schedule cannot be built, parsed, or run; the message marks the first wrong action."""


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


class MemoryBudgetError(FxparError):
    """A rank's program keeps more in memory at once than it may."""

    def __init__(self, found_mib: str, budget_mib: str, where: str, parts: str) -> None:
        super().__init__(
            f"{where}: {found_mib} MiB are in memory there: expected at most {budget_mib} MiB. In MiB: {parts}. "
            'Fewer microbatches in flight ("1f1b"), more stages, smaller microbatches or more shards need less'
        )


class UnknownLoweringError(FxparError):
    """The lowering's name is not one that fxpar has."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown lowering {found!r}: {_one_of(expected, found)}")


class MeshSizeError(FxparError):
    """The mesh does not have as many places as there are processes."""

    def __init__(self, sizes: str, product: int, world_size: int) -> None:
        super().__init__(
            f"mesh {sizes} has {product} ranks, but {world_size} processes were started; "
            f"start {product} processes (torchrun --nproc-per-node {product}) or change the mesh"
        )


class InvalidMeshError(FxparError):
    """An axis of the mesh has a size that is not a positive integer."""


class StageNotFoundError(FxparError):
    """A path in `stages` names no module, or one whose operations never run."""

    def __init__(self, path: str, expected: Sequence[str], reason: str) -> None:
        super().__init__(f"stages: {path!r} {reason}: {_one_of(expected, path)}")


class InvalidStagesError(FxparError):
    """`stages` does not describe as many stages as the mesh has pipe ranks."""


class HintNotFoundError(FxparError):
    """A pattern in `layouts` matches no parameter and no module."""

    def __init__(self, pattern: str, expected: Sequence[str]) -> None:
        super().__init__(
            f"layouts: pattern {pattern!r} matches no parameter and no module output: {_one_of(expected, pattern)}"
        )


class InvalidHintError(FxparError):
    """A sharding hint has an unknown axis, too many dims, or uses an axis twice."""

    def __init__(self, where: str, hint: object, problem: str) -> None:
        super().__init__(f"layouts: hint {hint!r} for {where}: {problem}")


class InfeasibleLayoutError(FxparError):
    """No assignment of layouts satisfies all hints together."""


class MicrobatchError(FxparError):
    """The batch does not divide into the microbatches."""

    def __init__(self, argument: str, size: int, microbatches: int) -> None:
        super().__init__(
            f"argument {argument} has a batch of {size}, which {microbatches} microbatches do not divide; "
            f"pass a batch that is a multiple of {microbatches} on every rank, or change `microbatches`"
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


class GraphBreakError(FxparError):
    """The model's forward did not trace into one graph."""

    def __init__(self, reason: str, where: str) -> None:
        super().__init__(
            f"the model's forward breaks into several graphs, but fxpar needs it as one: {reason}\n"
            f"  at {where}\n  change the code there so that torch.compile(..., fullgraph=True) accepts it"
        )


class RandomGeneratorError(FxparError):
    """The model's forward draws random numbers from a `torch.Generator`, whose state is one process's own."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"the model's forward draws random numbers from a torch.Generator at {where}: expected generator=None, "
            "by which every element of a batch has the same random number on every mesh (torch.manual_seed before "
            "fxpar.distribute seeds them); or draw outside of the forward, and pass the numbers as an argument"
        )


class UnavailableTensorError(FxparError):
    """A tensor that the forward keeps on an object was read."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"the model's forward keeps a tensor on an object at {where}: a distributed step has it in pieces, on the "
            "ranks of one stage and for one microbatch after another, and keeps none of them; return the tensor from "
            "the forward, and read it in the output"
        )


class NoLossError(FxparError):
    """Gradients are enabled, but the forward returns no scalar to differentiate."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"the forward must return a scalar loss that requires grad when grad is enabled; it returned {found}; "
            "return the loss (alone or first among several outputs), or call the model under torch.no_grad()"
        )


class NotTheLossError(FxparError):
    """A backward reached a result of the forward that is not its loss."""

    def __init__(self, result: str, loss: str) -> None:
        super().__init__(
            f"{result} has no gradient: expected a backward through the loss alone, which is {loss}, since a step "
            "computes the gradients of its loss before it returns. Add up inside the forward what is to be "
            'differentiated, and return the sum as the loss (under the name "loss", or as the first scalar); detach() '
            "what is only to be looked at"
        )


class RemoteResultError(FxparError):
    """The values of a result were used on a rank that does not hold them."""

    def __init__(self, result: str, ranks: Sequence[int]) -> None:
        held = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(
            f"{result} is held by {held}, of the last stage, and its values are not on this rank: use them there, or "
            'compile with options={"results": "all"}, by which every rank gets all results'
        )


class NotCompiledError(FxparError):
    """The distributed model was called without being compiled."""

    def __init__(self) -> None:
        super().__init__(
            "a distributed model only runs compiled, because its parameters are shards: "
            'call torch.compile(model, backend="fxpar") and run what that returns'
        )


class RecompileLimitError(NotCompiledError):
    """torch stopped compiling the distributed model for further shapes of its arguments."""

    def __init__(self, num_compiles: int, limit: int) -> None:
        FxparError.__init__(
            self,
            f"the distributed model was compiled {num_compiles} times, once for each combination of argument shapes "
            f"and modes (train or eval, with or without grad), and torch's recompile limit is {limit}: expected fewer "
            "combinations, or a higher limit. Set torch._dynamo.config.recompile_limit (and, beyond 256, "
            "torch._dynamo.config.accumulated_recompile_limit) before the first step, or pad batches and sequences to "
            "a few sizes",
        )


class WrongBackendError(FxparError):
    """The distributed model was compiled by another backend."""

    def __init__(self) -> None:
        super().__init__(
            "a distributed model was compiled by another backend, which cannot run it, because its parameters are "
            'shards: expected torch.compile(model, backend="fxpar"); torch.compile without backend= takes "inductor"'
        )


class NotDistributedError(FxparError):
    """A model would be trained on one device by each of several ranks, none of which knows of the others."""

    def __init__(self, mesh: str) -> None:
        super().__init__(
            f'backend="fxpar" was given a model to train that is not distributed, after init_mesh made {mesh}: each '
            "rank would train a copy of its own. Call fxpar.distribute(model, mesh, ...) before torch.compile and "
            'before the optimizer is made; a model that is to be trained without the mesh can have backend="inductor"'
        )


class StaleOptimizerError(FxparError):
    """An optimizer was made of parameters that `distribute` has replaced."""

    def __init__(self, optimizer: str, names: Sequence[str], num_stale: int) -> None:
        others = f" and {num_stale - len(names)} others" if num_stale > len(names) else ""
        super().__init__(
            f"{optimizer} updates parameters that are not the model's any more ({', '.join(names)}{others}): "
            "fxpar.distribute replaced them by shards, so that this step would train nothing. Make the optimizer of "
            "model.parameters() after fxpar.distribute"
        )


class AlreadyDistributedError(FxparError):
    """`distribute` was called twice on one model."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} is distributed already; build a fresh model to distribute it differently")


class UninitializedModuleError(FxparError):
    """A module built on the meta device has buffers that neither it nor a checkpoint can give values."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        super().__init__(
            f"module {path!r} was built on the meta device with the buffers {', '.join(names)}, which no checkpoint "
            "has (persistent=False), and nothing computed them; pass init_weights=<callable taking a module> that does "
            "to distribute (models of transformers have model._init_weights), or build this module on a real device"
        )


class NotLoadedError(FxparError):
    """A model built on the meta device runs before all its tensors have values."""

    def __init__(self, names: Sequence[str], shown: int = 10) -> None:
        more = f" and {len(names) - shown} more" if len(names) > shown else ""
        super().__init__(
            f"the model was built on the meta device, and has no values yet for {', '.join(names[:shown])}{more}; call "
            "load_state_dict before the first step, or pass init_weights=<callable taking a module> to distribute"
        )


class PlanMismatchError(FxparError):
    """Ranks derived different plans; raised before the first collective, so nothing hangs."""


class UnsupportedGraphError(FxparError):
    """The model does something that fxpar cannot run distributed; the message says where and what instead."""


class SharedBufferError(FxparError):
    """A stage uses a buffer that another stage changes."""

    def __init__(self, buffer: str, owner: int, other: int) -> None:
        super().__init__(
            f"buffer {buffer!r} is changed by stage {owner} and used by stage {other}: expected all uses of a "
            "buffer that the forward changes in one stage, since stages run different microbatches at a time; open the "
            "stages elsewhere, or give each stage a buffer of its own"
        )


class OptimizerStateError(FxparError):
    """An optimizer's state dict does not fit the optimizer that is to load it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"the optimizer's state dict cannot be loaded: {problem}; {remedy}")


class InvalidRuleError(FxparError):
    """A sharding rule that `register_rule` was given does not fit its op."""

    def __init__(self, op: object, notation: str, expected: str, found: str) -> None:
        super().__init__(
            f"sharding rule {notation!r} of {op}: expected {expected}, found {found}; name every tensor "
            "parameter of the op and every result, as in 'm k, k n -> m n'"
        )


class ReshardError(FxparError):
    """A tensor cannot be moved as asked between two meshes or layouts."""


class UnknownStrategyError(FxparError):
    """The name is not one of a resharding strategy."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown resharding strategy {found!r}: {_one_of(expected, found)}")


class UnknownAlgorithmError(FxparError):
    """The name is not one of an algorithm that orders transfers."""

    def __init__(self, found: str, expected: Sequence[str]) -> None:
        super().__init__(f"unknown algorithm {found!r}: {_one_of(expected, found)}")


class CoreNotBuiltError(FxparError):
    """The native core's shared library is missing, cannot be loaded, or is older than the Python code."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"expected fxpar's native core at {path}, but {reason}; build it with `make install` "
            "(or `pip install -e .`), which needs a C++ compiler"
        )


class PeerLostError(FxparError):
    """A rank died, or its connection broke, while a value was on its way."""

    def __init__(self, value: str, peer: int | None, reason: str) -> None:
        lost = "another rank" if peer is None else f"rank {peer}"
        super().__init__(f"lost {lost} while moving {value}: {reason}; look at that rank's own output")


class BrokenWorldError(FxparError):
    """A step is to run after one that failed on the same rank, in which other ranks may still be."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"an earlier step failed on this rank ({reason}), and what other ranks send for it may still arrive: "
            "expected a world in which all steps ended; start all ranks again, or let each of them destroy its process "
            "group, form it anew, and call init_mesh and distribute once more"
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
        super().__init__(f"unknown cluster {found!r}: {_one_of(expected, found)}; the name of a file ends in .json")


class PlanningError(FxparError):
    """A plan cannot be searched for, or there is none."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"plan: {problem}; {remedy}")


class SharedMemoryError(FxparError):
    """Memory that the ranks of one host share cannot be had."""

    def __init__(self, asked: str, reason: str) -> None:
        super().__init__(
            f"cannot {asked} of the memory that ranks of one host share: {reason}; use less memory on this host, or "
            "give each rank an FXPAR_HOST of its own, so that they exchange data through the network"
        )
