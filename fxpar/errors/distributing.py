"""What can be wrong in how a model is distributed: its mesh, stages, hints, rules, parameters and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpar.errors.base import FxparError, one_of, some_of


class MeshSizeError(FxparError):
    """The mesh does not have as many places as there are processes."""

    def __init__(self, sizes: str, product: int, world_size: int) -> None:
        super().__init__(
            f"mesh {sizes} has {product} ranks, but {world_size} processes were started; "
            f"start {product} processes (torchrun --nproc-per-node {product}) or change the mesh"
        )


class TooFewQueuesError(FxparError):
    """CUDA has too few hardware queues for a pipeline."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {found}: expected at least {expected} for a pipeline, since over NCCL a "
            "posted receive could stand in front of the send that it waits for; set it to 32, or leave it unset and "
            "import fxpar before the first use of CUDA"
        )


class InvalidMeshError(FxparError):
    """An axis of the mesh has a size that is not a positive integer."""


class NoMeshError(FxparError):
    """Something that follows the mesh was made before it."""

    def __init__(self, follower: str) -> None:
        super().__init__(f"{follower} follows the mesh, but there is none: call fxpar.init_mesh(...) before it is made")


class StageNotFoundError(FxparError):
    """A path in `stages` names no module, or one whose operations never run."""

    def __init__(self, path: str, expected: Sequence[str], reason: str) -> None:
        super().__init__(f"stages: {path!r} {reason}: {one_of(expected, path)}")


class InvalidStagesError(FxparError):
    """`stages` does not describe as many stages as the mesh has pipe ranks."""


class HintNotFoundError(FxparError):
    """A pattern in `layouts` matches no parameter and no module."""

    def __init__(self, pattern: str, expected: Sequence[str]) -> None:
        super().__init__(
            f"layouts: pattern {pattern!r} matches no parameter and no module output: {one_of(expected, pattern)}"
        )


class PrecisionPatternError(FxparError):
    """A pattern in `Precision.keep` matches no parameter."""

    def __init__(self, pattern: str, expected: Sequence[str]) -> None:
        super().__init__(f"precision.keep: pattern {pattern!r} matches no parameter: {one_of(expected, pattern)}")


class InvalidHintError(FxparError):
    """A sharding hint has an unknown axis, too many dims, or uses an axis twice."""

    def __init__(self, where: str, hint: object, problem: str) -> None:
        super().__init__(f"layouts: hint {hint!r} for {where}: {problem}")


class UnknownStyleError(FxparError):
    """A parallel style, of a model's plan or of `layouts`, is none of those that are known."""

    def __init__(self, where: str, style: str, known: Sequence[str]) -> None:
        super().__init__(
            f"style {style!r} for {where}: {one_of(known, style)}; give these parameters a hint in `layouts`, which is "
            'laid over a plan, or ignore the plan with layouts="search"'
        )


class NoShippedPlanError(FxparError):
    """`layouts="plan"` asks for the plan of a model that ships none, or one that names none of its parameters."""

    def __init__(self, model: str, reasons: Sequence[str]) -> None:
        found = f"its plan shards nothing here: {'; '.join(reasons)}" if reasons else "it has none"
        super().__init__(
            f'layouts="plan": expected {model} or a module of it to ship a tensor-parallel plan (`tp_plan`, `_tp_plan` '
            f"or `ep_plan`), but {found}; leave `layouts` out, or give hints"
        )


class InfeasibleLayoutError(FxparError):
    """No assignment of layouts satisfies all hints together."""


class InvalidRuleError(FxparError):
    """A sharding rule that `register_rule` was given does not fit its op."""

    def __init__(self, op: object, notation: str, expected: str, found: str) -> None:
        super().__init__(
            f"sharding rule {notation!r} of {op}: expected {expected}, found {found}; name every tensor "
            "parameter of the op and every result, as in 'm k, k n -> m n'"
        )


class SharedBufferError(FxparError):
    """A stage uses a buffer that another stage changes."""

    def __init__(self, buffer: str, owner: int, other: int) -> None:
        super().__init__(
            f"buffer {buffer!r} is changed by stage {owner} and used by stage {other}: expected all uses of a "
            "buffer that the forward changes in one stage, since stages run different microbatches at a time; open the "
            "stages elsewhere, or give each stage a buffer of its own"
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


class OptimizerAcrossStagesError(FxparError):
    """An optimizer whose step depends on all gradients at once was given those of a pipeline."""

    def __init__(self, kind: str, num_stages: int) -> None:
        super().__init__(
            f"{kind} takes products over all parameters of a model, but this rank has those of one of {num_stages} "
            "parts of a pipeline: expected an optimizer that treats each parameter by itself, such as AdamW, or a mesh "
            "with pipe=1"
        )


class UnfrozenOnOneStageError(FxparError):
    """A parameter of a pipeline was unfrozen after the first step, where ranks of other stages do not see it."""

    def __init__(self, name: str) -> None:
        path, _, _ = name.rpartition(".")
        module = f'model.get_submodule("{path}")' if path else "model"
        super().__init__(
            f"parameter {name} requires grad, but was frozen in earlier steps of this pipeline, and ranks of other "
            f"stages, which compute what its gradient needs, do not see it: call {module}.requires_grad_() on all "
            "ranks, which tells them, or unfreeze it before the first step"
        )


class OptimizerStateError(FxparError):
    """An optimizer's state dict does not fit the optimizer that is to load it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"the optimizer's state dict cannot be loaded: {problem}; {remedy}")


class BatchMixingWarning(UserWarning):
    """An op combines the samples of a batch with each other, and is given those of a part of the batch."""

    def __init__(self, op: object, line: str, num_samples: int, microbatches: int, num_shards: int) -> None:
        super().__init__(
            f"{op} in {line} combines samples of the batch with each other, and sees {num_samples} at a time: the "
            f"batch comes in {microbatches} microbatches on {num_shards} shards, on whose numbers the loss and its "
            "gradients therefore depend. For those of the whole batch, use one microbatch and no axes data and z, or "
            "an operation that treats every sample by itself"
        )


class ChangingBufferWarning(UserWarning):
    """The loss reads a buffer that changes with each part of the batch."""

    def __init__(self, line: str, microbatches: int, num_shards: int) -> None:
        super().__init__(
            f"the loss depends on a buffer that the forward changes by the batch, in {line}. The batch comes in "
            f"{microbatches} microbatches on {num_shards} shards: each microbatch reads what the ones before it left, "
            "and after the step all shards have what the first one left. For the numbers of the whole batch, use one "
            "microbatch and no axes data and z, or change the buffer between steps"
        )


class SumLossWarning(UserWarning):
    """The loss is a sum over the samples of a batch, of whose parts the mean is taken."""

    def __init__(self, microbatches: int, num_shards: int) -> None:
        super().__init__(
            "the loss is a sum over samples, or has a term that is one. "
            f"Of {microbatches} microbatches on {num_shards} batch shards the mean is taken, as of any loss: such a "
            f"sum, and its gradients, are 1/{microbatches * num_shards} of those of the whole batch. Divide the sum in "
            "the forward, by the number of samples for instance, or multiply it by the number of microbatches and "
            "shards. A number of items that the forward is given is to be that of one microbatch"
        )


class OpsWithoutRuleWarning(UserWarning):
    """Ops have no sharding rule; `ops` counts them by their names."""

    def __init__(self, ops: Mapping[str, int], axes: Sequence[str]) -> None:
        names = some_of([f"{name} ({count})" for name, count in ops.items()])
        super().__init__(
            f"all ranks along {' and '.join(axes)} compute {sum(ops.values())} ops whole, since these have no sharding "
            f"rule: {names}; see fxpar.register_rule"
        )
        self.ops = ops
