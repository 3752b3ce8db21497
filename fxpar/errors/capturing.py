"""What can be wrong in the forward of a model, and in how it is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors.base import FxparError


class GraphBreakError(FxparError):
    """The model's forward did not trace into one graph."""

    def __init__(self, reason: str, where: str) -> None:
        super().__init__(
            f"the model's forward breaks into several graphs, but fxpar needs it as one: {reason}\n"
            f"  at {where}\n  change the code there so that torch.compile(..., fullgraph=True) accepts it"
        )


class DataDependentShapeError(GraphBreakError):
    """The model's forward makes a tensor whose shape depends on values, as by selecting elements by a mask."""

    def __init__(self, op: str, where: str) -> None:
        FxparError.__init__(
            self,
            f"the shape of what {op} returns depends on values, but a step is compiled for known shapes\n"
            f"  at {where}\n  keep all elements, and let those that a mask leaves out have no effect: write "
            "(losses * mask).sum() / mask.sum() in place of losses[mask].mean(), and cross_entropy(logits, "
            "labels.masked_fill(~mask, -100)) in place of cross_entropy(logits[mask], labels[mask])",
        )


class AllRowsWarning(UserWarning):
    """Many masks select rows of one tensor, such as the tokens of each expert, and all rows are computed for each."""

    def __init__(self, masks: int, rows: int, where: str) -> None:
        super().__init__(
            f"{masks} masks select rows of one tensor at {where}. No shape may depend on values, so what is computed "
            f"of the selected rows is computed of all {rows} of a microbatch, once for each mask. To compute each "
            "token by its own experts alone, use a grouped product, torch.nn.functional.grouped_mm"
        )


class CollectiveInForwardError(FxparError):
    """The model's forward communicates by itself, over a process group that is not that of all ranks."""

    def __init__(self, collective: str, where: str) -> None:
        super().__init__(
            f"the model's forward calls {collective} over a process group of its own\n  at {where}\n"
            "  expected a forward as on one process, since fxpar divides it among the ranks: leave the collective out, "
            "and let `layouts` shard what the model shards by hand"
        )


class CollectiveInForwardWarning(UserWarning):
    """The model's forward calls collectives over all ranks, which are traced as on one process."""

    def __init__(self, collectives: Sequence[str]) -> None:
        super().__init__(
            f"the model's forward calls {' and '.join(collectives)} of torch.distributed: it is traced as on one "
            "process, where this communicates nothing, get_world_size() is 1 and get_rank() is 0. A number of ranks "
            "that the model has kept from before is another one: do not divide by it"
        )


class ForwardRaisesError(FxparError):
    """The model's forward raises an exception of its own for the arguments that it was given."""

    def __init__(self, exception: str, where: str) -> None:
        super().__init__(
            f"the model's forward raises {exception} for these arguments\n"
            f"  at {where}\n  the plain model does so, too, before fxpar.distribute; if it does not, torch's compiler "
            "misreads the code there, and torch.compile(..., fullgraph=True) fails alike"
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
            "the forward, and read it in the output; what the next forward is to read belongs into a registered buffer"
        )


class UnsupportedGraphError(FxparError):
    """The model does something that fxpar cannot run distributed; the message says where and what instead."""


class NoLossError(FxparError):
    """Gradients are enabled, but of what the forward returns, no loss can be computed."""

    def __init__(self, found: str) -> None:
        super().__init__(
            "the forward must return a scalar loss that requires grad when grad is enabled, or results that require "
            f"grad, of which the samples are known; it returned {found}; return the loss (alone or first among several "
            "outputs); or call fxpar.add_loss(model, loss_function) before distribute, and the compiled model with "
            "target=...; or call the model under torch.no_grad()"
        )


class OutsideLossWarning(UserWarning):
    """A script computes its loss of the results of the forward, which therefore runs twice in each step."""

    def __init__(self) -> None:
        super().__init__(
            "a loss is computed of what the forward returns, so that each step runs the forward twice: first for its "
            "results, then with the backward. To run it once, compute the loss in the forward: as by "
            "fxpar.add_loss(model, loss_function) before distribute, and the compiled model called with target=..."
        )


class MicrobatchError(FxparError):
    """The batch that a plan is made for does not divide into the microbatches."""

    def __init__(self, argument: str, size: int, microbatches: int) -> None:
        super().__init__(
            f"argument {argument} has a batch of {size}, which {microbatches} microbatches do not divide; "
            f"pass a batch that is a multiple of {microbatches} on every rank, or change `microbatches`"
        )


class BlockMaskError(FxparError):
    """A block mask of several rows was made for the whole batch, of which each microbatch has a part."""

    def __init__(self, argument: str, rows: int, microbatches: int) -> None:
        super().__init__(
            f"argument {argument} is a BlockMask of {rows} rows, but the forward computes one of {microbatches} "
            "microbatches at a time, and what its mask_mod reads cannot be split: expected one row, which all share. "
            "Call create_block_mask inside the forward, on tensors that are arguments; or create it with B=None, if "
            "all rows have the same mask; or use microbatches=1"
        )


class ArgumentFormatError(FxparError):
    """An argument of the forward is a sparse or a nested tensor."""

    def __init__(self, argument: str, found: object) -> None:
        super().__init__(
            f"argument {argument} is a tensor in the format {found}: expected dense tensors, which can be divided into "
            "microbatches and shards; pass its to_dense(), or of a nested tensor torch.nested.to_padded_tensor"
        )


class NotCompiledError(FxparError):
    """The distributed model was called without being compiled."""

    def __init__(self) -> None:
        super().__init__(
            "a distributed model only runs compiled, because its parameters are shards: "
            'call torch.compile(model, backend="fxpar") and run what that returns'
        )


class RecompileLimitError(NotCompiledError):
    """torch stopped compiling the distributed model for further values that its forward depends on."""

    def __init__(self, limit: int) -> None:
        FxparError.__init__(
            self,
            "torch's recompile limit is reached: for arguments of these shapes the distributed model was compiled "
            f"{limit} times, for values that its forward reads, such as numbers among its arguments or attributes, and "
            "modes (train or eval, with or without grad); expected fewer. Pass what changes from step to step as a "
            "tensor, or set torch._dynamo.config.recompile_limit (and, beyond 256, "
            "torch._dynamo.config.accumulated_recompile_limit) before the first step. TORCH_LOGS=recompiles tells what "
            "changed",
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
