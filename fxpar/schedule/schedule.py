"""Schedules as plain data: the order in which every pipe rank runs its actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxpar.errors import InvalidScheduleError
from fxpar.schedule.action import Action, Kind, parse_action

_FOLLOWS: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}
_EXCLUDES: dict[Kind, Kind] = {"B": "I", "I": "B"}


@dataclass(frozen=True, slots=True)
class Schedule:
    """`ranks[r]` is what pipe rank r runs, in order: all actions of one stage, or of several.

    A schedule is always complete: each stage is on one rank, which runs its forward of each microbatch once and,
    unless the schedule has no backward at all, its backward once and later. Whether the orders of the ranks match
    depends on what the stages exchange; `check_programs` proves it. `str` returns one line per rank, which `parse`
    reads. `placement[s]` is the rank that runs stage s.

    Raises InvalidScheduleError, which marks the first wrong action.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_microbatches < 1:
            found = f"{self.num_stages} stages and {self.num_microbatches} microbatches"
            raise InvalidScheduleError(f"{self.name}: {found}: expected at least 1 of each")
        if len(self.ranks) > self.num_stages:
            found = f"{len(self.ranks)} pipe ranks for {self.num_stages} stages"
            raise InvalidScheduleError(f"{self.name}: {found}: expected a stage or more for each rank")
        homes: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            if not actions:
                raise InvalidScheduleError(f"{self.name}, rank {rank} runs nothing: expected a stage or more for it")
            _check_order(self, rank, homes)
        object.__setattr__(self, "placement", tuple(homes.get(stage, 0) for stage in range(self.num_stages)))
        for stage, rank in enumerate(self.placement):
            _check_whole(self, stage, rank)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @staticmethod
    def parse(text: str, name: str = "custom") -> Schedule:
        """The schedule that prints as `text`: line r has rank r's actions, separated by blanks.

        Raises InvalidScheduleError for what is not an action and for an incomplete schedule.
        """
        return schedule_from_cells((line.split() for line in text.strip().splitlines()), name)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` runs, ascending."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == rank)

    def splits(self, stage: int) -> bool:
        """Whether the backward of `stage` runs in two parts, I and W, for some microbatch."""
        return any(action.kind == "I" and action.stage == stage for action in self.ranks[self.placement[stage]])

    def runs_whole(self, stage: int) -> bool:
        """Whether the backward of `stage` runs as one, B, for some microbatch."""
        return any(action.kind == "B" and action.stage == stage for action in self.ranks[self.placement[stage]])

    @property
    def has_backward(self) -> bool:
        """Whether it has backwards; if not, it only runs forwards."""
        return any(action.kind != "F" for actions in self.ranks for action in actions)


def schedule_from_cells(rows: Iterable[Iterable[str]], name: str) -> Schedule:
    """The schedule whose rank r runs the actions in row r, each in its printed form."""
    ranks = tuple(
        tuple(_parse_cell(cell, rank, position, name) for position, cell in enumerate(row))
        for rank, row in enumerate(rows)
    )
    num_microbatches = max((action.microbatch + 1 for actions in ranks for action in actions), default=0)
    num_stages = max((action.stage + 1 for actions in ranks for action in actions), default=0)
    return Schedule(name, max(num_stages, len(ranks)), num_microbatches, ranks)


def _parse_cell(cell: str, rank: int, position: int, name: str) -> Action:
    try:
        return parse_action(cell)
    except InvalidScheduleError as error:
        raise InvalidScheduleError(f"{name}, rank {rank}, action {position}: {error}") from None


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without its backward, as evaluation without gradients runs it."""
    ranks = tuple(tuple(action for action in actions if action.kind == "F") for actions in schedule.ranks)
    return Schedule(f"{schedule.name}, forward only", schedule.num_stages, schedule.num_microbatches, ranks)


def check_trains(schedule: Schedule) -> None:
    """Refuse a schedule without a backward for a step with gradients.

    Raises:
        InvalidScheduleError: names the first missing backward; a schedule cannot lack only some of them.
    """
    if schedule.has_backward:
        return
    missing = Action(0, "B", 0)
    rank = schedule.placement[0]
    raise InvalidScheduleError(
        f"{schedule.name}, rank {rank}: {missing} is missing, and so is every other backward: the schedule only runs "
        "forwards, but grad is enabled; add the actions B, or I and W, of every stage and microbatch, or call the "
        f"model under torch.no_grad()\n  {_gap(schedule.ranks[rank], missing)}"
    )


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the largest number of forwards begun, of any stage, whose microbatch's last action has not ended."""
    last_kinds: tuple[Kind, ...] = ("B", "W") if schedule.has_backward else ("F",)
    return tuple(_peak_of_rank(actions, last_kinds) for actions in schedule.ranks)


def _peak_of_rank(actions: Sequence[Action], last_kinds: Sequence[Kind]) -> int:
    in_flight = peak = 0
    for action in actions:
        in_flight += action.kind == "F"
        peak = max(peak, in_flight)
        in_flight -= action.kind in last_kinds
    return peak


def marked(items: Sequence[object], position: int, separator: str = " ", around: int = 3) -> str:
    """Some `items` around `position`, with arrows at the one there, for error messages."""
    first, stop = max(0, position - around), position + around + 1
    shown = [f"--> {item} <--" if i == position else str(item) for i, item in enumerate(items[:stop])][first:]
    return separator.join((["..."] if first else []) + shown + (["..."] if stop < len(items) else []))


def _check_order(schedule: Schedule, rank: int, homes: dict[int, int]) -> None:
    """Raise unless every action of `rank` can run after those before it; adds the rank's stages to `homes`."""
    actions = schedule.ranks[rank]
    done: set[Action] = set()
    for position, action in enumerate(actions):
        if problem := _problem(schedule, rank, action, done, homes):
            where = f"{schedule.name}, rank {rank}, action {position}"
            raise InvalidScheduleError(f"{where}: {action} {problem}\n  {marked(actions, position)}")
        homes[action.stage] = rank
        done.add(action)


def _problem(schedule: Schedule, rank: int, action: Action, done: set[Action], homes: Mapping[int, int]) -> str | None:
    """Why `action` cannot run on `rank` after the actions that are `done`; None if it can."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if stage >= schedule.num_stages:
        return f"is of stage {stage}: expected one below {schedule.num_stages}"
    if homes.get(stage, rank) != rank:
        return f"is of stage {stage}, which rank {homes[stage]} runs: expected all actions of a stage on one rank"
    if microbatch >= schedule.num_microbatches:
        return f"is of microbatch {microbatch}: expected one below {schedule.num_microbatches}"
    if action in done:
        return "runs a second time"
    if kind in _FOLLOWS and (before := Action(stage, _FOLLOWS[kind], microbatch)) not in done:
        return f"runs before {before}"
    if kind in _EXCLUDES and (other := Action(stage, _EXCLUDES[kind], microbatch)) in done:
        return f"repeats a part of {other}: B is I and W in one"
    return None


def _check_whole(schedule: Schedule, stage: int, rank: int) -> None:
    """Raise if an action of `stage` is missing."""
    done = {action for action in schedule.ranks[rank] if action.stage == stage}
    for microbatch in range(schedule.num_microbatches):
        forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in ("F", "B", "I", "W"))
        last = (weights if inputs in done else whole) if schedule.has_backward else forward
        for needed in (forward, last):
            if needed not in done:
                if not done:
                    rows = "\n  ".join(marked(actions, -1) for actions in schedule.ranks)
                    raise InvalidScheduleError(
                        f"{schedule.name}: {needed} is missing: no rank runs its stage\n  {rows}"
                    )
                where = f"{schedule.name}, rank {rank}"
                raise InvalidScheduleError(f"{where}: {needed} is missing\n  {_gap(schedule.ranks[rank], needed)}")


def _gap(actions: Sequence[Action], missing: Action) -> str:
    """Show where `missing` could be: after that of the previous microbatch, or at the end."""
    before = Action(missing.stage, missing.kind, missing.microbatch - 1)
    position = actions.index(before) + 1 if before in actions else len(actions)
    return marked([*actions[:position], f"{missing}?", *actions[position:]], position)
