"""The options of `torch.compile(..., backend="fxpar", options=...)`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fxpar.environment import dump_folder
from fxpar.errors import (
    InvalidOptionError,
    UnknownAlgorithmError,
    UnknownLoweringError,
    UnknownOptionError,
)
from fxpar.ir.overlap_options import FUSE_ALWAYS, HELD_REDUCTIONS, OVERLAP_RULES, Fuse, Overlap
from fxpar.ir.remat import POLICIES
from fxpar.ir.storage_options import AUTO, TIMES
from fxpar.resharding.search import ALGORITHMS
from fxpar.resharding.strategies import strategy_named
from fxpar.schedule import schedule_text

INDUCTOR, SLEEP = "inductor", "sleep"
LOWERINGS = (INDUCTOR, "aten", SLEEP)
LAST_STAGE, ALL_STAGES = "last_stage", "all"


@dataclass(frozen=True, slots=True)
class Options:
    """How to compile.

    dump: directory for numbered dumps of every pass (default: the environment variable FXPAR_DUMP, else none).
    timeline: directory in which each rank writes what it did, and when, in its latest step.
    profile: whether to time every stage's graphs once, and go by that rather than by estimates.
    lowering: what turns graphs into code; "inductor" or "aten" (the reference); or "sleep", by which nothing is
        computed, but ranks communicate and sleep as long as the mesh's cluster would compute: all results are
        meaningless, but for the time that they take.
    schedule: another pipeline schedule than the one that `distribute` was given, for the same stages of each rank; kept
        as its name or as text.
    strategy: how values move between stages; "broadcast", "send_recv", "local_allgather" or "global_allgather"; or
        "signal", by which one element of each arrives and all results are meaningless, but for the time that they take.
    algorithm: what chooses the senders and the order of what moves; "best", "greedy", "depth_first", "balance" or
        "naive".
    memory_bytes: how much memory a step of a rank may take, by what its graphs and schedule need (default: that of its
        GPU; on a CPU, any).
    gather_weights: when weights that are stored in shards over z are gathered; "step", once for all microbatches;
        "microbatch", in the graph of each, which keeps what it gathered for its backward; or "auto": "microbatch" where
        a step has but one, else "step" if it fits into memory.
    reduce_gradients: when their gradients are reduced to shards again: "step", once, when the microbatches are summed;
        "microbatch", in the graph of each; or "auto", as above.
    remat: how much of the forward runs once more in the backward rather than be kept for it; "none", "min_cut" (what is
        cheap) or "full" (every layer), besides what the model checkpoints itself. See `fxpar.ir.remat.Remat`.
    gathered_bytes: how much of the weights that the graph of a microbatch gathers is kept for its backward, which
        gathers the rest again (default: all).
    overlap: which collectives run beside computation: True (all), False, or some of the rules "input_gradients",
        "reduce_scatters" and "all_gathers". They never change results.
    fuse: which collectives become one op with the matmuls beside them: True, where that is estimated to be cheaper than
        running them beside other computation; "always", wherever it can be; or False. Fused ops may round otherwise.
    gather_ahead_bytes: how many bytes of gathered weights a graph may hold before their first use (default: those of
        one layer, whatever it has).
    held_reductions: how much memory the gradients whose reductions run beside a backward may take before the oldest is
        waited for, in multiples of the largest (default: 2; infinity: all are waited for when the backward is over).
    results: which ranks get the results of the forward besides the loss, which all ranks have: "last_stage", those of
        the last stage, while on others a result has a shape but no values; or "all", every rank, as a DTensor on the
        mesh of its own stage, by a broadcast over the pipe axis.
    check_inputs: whether ranks that must be given the same inputs (those that differ only along pipe, y and x) compare
        checksums of them: in steps 1, 2, 4, 8 and so on of every compiled shape, then in every 1024th.
    transfer_timeout_s: how many seconds a rank waits for one message of another stage, which may still have to compute
        it, until a PeerLostError says which. The death of a rank is noticed at once.
    """

    dump: Path | None = None
    timeline: Path | None = None
    profile: bool = False
    lowering: str = "inductor"
    schedule: str | None = None
    strategy: str = "broadcast"
    algorithm: str = "best"
    memory_bytes: float | None = None
    gather_weights: str = AUTO
    reduce_gradients: str = AUTO
    remat: str = "none"
    gathered_bytes: float = math.inf
    overlap: bool | Collection[str] = True
    fuse: Fuse = True
    gather_ahead_bytes: float = math.inf
    held_reductions: float = HELD_REDUCTIONS
    results: str = LAST_STAGE
    check_inputs: bool = True
    transfer_timeout_s: float = 1800.0

    @property
    def overlapping(self) -> Overlap:
        """What `overlap`, `gather_ahead_bytes` and `held_reductions` say together."""
        all_or_none = OVERLAP_RULES if self.overlap is True else ()
        named = all_or_none if isinstance(self.overlap, bool) else self.overlap
        rules = frozenset(rule for rule in OVERLAP_RULES if rule in named)
        return Overlap(rules, self.gather_ahead_bytes, self.held_reductions)


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Check the user's options by name and value.

    Raises:
        UnknownOptionError, InvalidOptionError, UnknownLoweringError, UnknownScheduleError, InvalidScheduleError,
        UnknownStrategyError, UnknownAlgorithmError
    """
    values = dict(given or {})
    values["dump"] = values.get("dump") or dump_folder()
    known = [field.name for field in fields(Options)]
    for name in values:
        if name not in known:
            raise UnknownOptionError(name, known)
    for name in ("dump", "timeline"):
        if not isinstance(values.get(name), str | Path | None):
            raise InvalidOptionError(name, values[name], "a directory")
        values[name] = Path(values[name]) if values.get(name) else None
    if values.get("schedule") is not None:
        values["schedule"] = schedule_text(values["schedule"])
    options = Options(**values)
    _check_names(options)
    for name, flag in (("profile", options.profile), ("check_inputs", options.check_inputs)):
        if not isinstance(flag, bool):
            raise InvalidOptionError(name, flag, "True or False")
    gathered = options.gathered_bytes
    if not (isinstance(gathered, int | float) and gathered >= 0):
        raise InvalidOptionError("gathered_bytes", gathered, "bytes")
    memory = options.memory_bytes
    if memory is not None and not (isinstance(memory, int | float) and memory > 0):
        raise InvalidOptionError("memory_bytes", memory, "a positive number of bytes")
    _check_overlap(options)
    if not isinstance(options.fuse, bool) and options.fuse != FUSE_ALWAYS:
        raise InvalidOptionError("fuse", options.fuse, f"True, False or {FUSE_ALWAYS!r}")
    timeout_s = options.transfer_timeout_s
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InvalidOptionError("transfer_timeout_s", timeout_s, "a positive number of seconds")
    return options


def _check_overlap(options: Options) -> None:
    given, budget_bytes = options.overlap, options.gather_ahead_bytes
    is_known = isinstance(given, bool) or (
        isinstance(given, Collection) and all(rule in OVERLAP_RULES for rule in given)
    )
    if not is_known:
        raise InvalidOptionError("overlap", given, f"True, False, or some of {', '.join(map(repr, OVERLAP_RULES))}")
    if not (isinstance(budget_bytes, int | float) and budget_bytes >= 0):
        raise InvalidOptionError("gather_ahead_bytes", budget_bytes, "a number of bytes, 0 or more")
    held = options.held_reductions
    if not (isinstance(held, int | float) and held >= 0):
        raise InvalidOptionError("held_reductions", held, "a multiple of the largest reduction, 0 or more")


def _check_names(options: Options) -> None:
    if options.lowering not in LOWERINGS:
        raise UnknownLoweringError(str(options.lowering), LOWERINGS)
    strategy_named(str(options.strategy))
    if options.results not in (LAST_STAGE, ALL_STAGES):
        raise InvalidOptionError("results", options.results, f"{LAST_STAGE!r} or {ALL_STAGES!r}")
    if options.algorithm not in ALGORITHMS:
        raise UnknownAlgorithmError(str(options.algorithm), ALGORITHMS)
    if options.remat not in POLICIES:
        raise InvalidOptionError("remat", options.remat, " or ".join(map(repr, POLICIES)))
    for name, given in (("gather_weights", options.gather_weights), ("reduce_gradients", options.reduce_gradients)):
        if given not in TIMES:
            raise InvalidOptionError(name, given, " or ".join(map(repr, TIMES)))
