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

INDUCTOR, TENSORRT, ATEN, SLEEP = "inductor", "tensorrt", "aten", "sleep"
LOWERINGS = (INDUCTOR, TENSORRT, ATEN, SLEEP)
LAST_STAGE, ALL_STAGES, OWN_SAMPLES = "last_stage", "all", "local"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the backend: `torch.compile(model, backend="fxpar", options={...})`.

    Types are those that values are converted to: `dump` and `timeline` may be strings, and `schedule` whatever
    `distribute` takes. A model that was not distributed is compiled for one device, and only `lowering` has an effect.

    dump: directory for dumps of the graphs after every pass, numbered in the order of the passes, in a folder for each
        rank (that of rank 0 has what all ranks do alike), and for `report.html`, a page that shows what limits a
        training step (default: the environment variable FXPAR_DUMP; if that is unset, nothing is dumped).
    timeline: directory for the measured timeline of the latest step, which rank 0 writes: `trace.json`, for Perfetto,
        has all ranks on the clock of rank 0, and there is a JSON file for each rank of the pipe axis, which
        `fxpar simulate --measured` draws beside the predicted one. All ranks gather it after every step, so that all
        are given this option or none.
    profile: whether to time the compiled graphs of every stage while compiling, and use these times instead of
        estimates in the schedule and in the costs that are dumped.
    lowering: how graphs become code: "inductor"; "tensorrt", for evaluation on CUDA devices, which builds engines by
        torch-tensorrt (`pip install fxpar[tensorrt]`) from the ops that have converters, and leaves the others to
        Inductor, as it does a model that was not distributed; "aten", the reference, which runs the ATen ops of a graph
        one by one; or "sleep", for benchmarks of communication, which runs the collectives, and sleeps as long as all
        other ops are estimated to take. With "sleep" all results are meaningless.
    schedule: a pipeline schedule in place of the one that `distribute` was given. It must run every stage on the same
        rank of the pipe axis.
    strategy: how a value is sent from stage to stage (Zhuang et al., section 3.1): "broadcast", in chunks along a chain
        of the receiving hosts; "send_recv", a copy for each receiving rank; "local_allgather", a copy for each
        receiving host, whose ranks get a part each and all-gather them; "global_allgather", one copy, of which all
        receiving ranks get a part each and all-gather them; or "signal", for benchmarks, which sends one element. With
        "signal" all results are meaningless.
    algorithm: how the sender and the order of the transfers between stages are chosen (Zhuang et al., section 3):
        "naive", in the given order, from the lowest host that has the value; "balance", the longest first, from the
        host that sends least so far; "depth_first", by branch and bound; "greedy", by randomized greedy search; or
        "best", by greedy, then depth-first search.
    memory_bytes: limit on the predicted peak memory of a step on one rank; a step that needs more raises
        MemoryBudgetError (default: 90% of its GPU's memory; on a CPU, no limit).
    gather_weights: when weights that are stored in shards over z are all-gathered: "step", once per step, which keeps
        them gathered for all microbatches; "microbatch", in the forward of each, which keeps up to `gathered_bytes` for
        its backward; or "auto": "microbatch" where a step has only one; else "step" if that fits into memory, else
        "microbatch".
    reduce_gradients: when the gradients of these weights are reduced to shards: "step", once, after those of all
        microbatches are added up; "microbatch", in the backward of each; or "auto", as for `gather_weights`.
    remat: how much of the forward is recomputed in the backward (activation checkpointing): "none"; "min_cut", cheap
        ops, where that saves memory; or "full", every layer from its inputs, where a layer is an item of an outermost
        `ModuleList`. What the model itself runs under `torch.utils.checkpoint` is recomputed in any case.
    gathered_bytes: how many bytes of all-gathered weights a microbatch keeps for its backward, which gathers the others
        again (default: all).
    overlap: which collectives overlap with computation: True (all), False (none), or some of the rules
        "input_gradients", their reductions, with the matmuls for weight gradients; "reduce_scatters", the reductions of
        weight gradients, with the rest of the backward; and "all_gathers", of weights, a layer before they are used.
        Results are bitwise the same.
    fuse: which collectives are fused with the matmuls next to them: True, those for which that is estimated to take no
        longer than overlap; "always", all for which it is possible; or False, none. Fused ops may round differently.
    gather_ahead_bytes: limit on the bytes of weights that are gathered before they are used; they are never gathered
        more than one layer ahead (default: no limit).
    held_reductions: limit on the memory of the weight gradients that are being reduced while the backward runs, in
        multiples of the largest: beyond it, the backward waits for the oldest. With `math.inf` it waits at its end.
    results: which ranks get the results of the forward besides the loss, which all ranks get: "last_stage", those of
        the last stage, while on others a result has a shape and a dtype but no values; "all", every rank, as a DTensor
        on the mesh of its own stage, by a broadcast over the pipe axis; or "local", every rank, as a plain tensor of
        the samples of its own batch shard, to be compared with labels as on one process. What has no samples, such as a
        number of hits, is that of the whole batch (default: "last_stage", or "local" for a forward that returns no
        scalar, so that a script may compute one).
    check_inputs: whether ranks that must be given the same inputs (those that differ only along pipe, y and x) compare
        checksums of them, in steps 1, 2, 4, 8 and so on of every compiled shape, and in every 1024th.
    transfer_timeout_s: how many seconds a rank waits for a value from another stage, including the time to compute it,
        before it raises PeerLostError. The death of a rank is noticed at once. Over NCCL, PyTorch's watchdog ends the
        process instead, some time after that; the death of a rank is a PeerLostError within seconds.
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
    results: str | None = None
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
    if options.results not in (None, LAST_STAGE, ALL_STAGES, OWN_SAMPLES):
        raise InvalidOptionError("results", options.results, f"{LAST_STAGE!r}, {ALL_STAGES!r} or {OWN_SAMPLES!r}")
    if options.algorithm not in ALGORITHMS:
        raise UnknownAlgorithmError(str(options.algorithm), ALGORITHMS)
    if options.remat not in POLICIES:
        raise InvalidOptionError("remat", options.remat, " or ".join(map(repr, POLICIES)))
    for name, given in (("gather_weights", options.gather_weights), ("reduce_gradients", options.reduce_gradients)):
        if given not in TIMES:
            raise InvalidOptionError(name, given, " or ".join(map(repr, TIMES)))
