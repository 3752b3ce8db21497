"""An explanation as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fxpar.explainer.explain import Explanation
from fxpar.explainer.proposals import whole_parts
from fxpar.explainer.step_facts import LayerCollectives

_MOST_ROWS = 8
"""Of collectives and of repeated work."""

_LEAST_SHARE = 1e-3
"""The share of the step from which repeated work is shown."""


def print_explanation(found: Explanation, console: Console) -> None:
    """What the step costs, then what bounds it, then what to change."""
    setup = found.setup
    console.print(
        f"{setup.configuration}, {_shown_schedule(setup.schedule)} on {found.cluster.name}: "
        f"a step of {_ms(found.step_us)} ms, bound by {found.bound_by}",
        highlight=False,
    )
    for table in (_stages(found), _memory(found), _collectives(found), _repeated(found), _plan(found)):
        if table.row_count:
            console.print(table)
    if found.shipped_plan.status == "ignored":
        console.print("the model ships a tensor-parallel plan, which is not read here", highlight=False)
    console.print(_parts(found))
    if not found.fits:
        peak, budget = (f"{size / 2**30:,.3f} GiB" for size in (found.estimate.peak_bytes, found.budget_bytes))
        console.print(f"it does not fit into memory: it takes {peak} of {budget}", highlight=False)
    if found.proposals:
        console.print(_proposals(found))
    else:
        console.print("no change that was tried would help noticeably", highlight=False)
    more = len(found.tried) - len(found.proposals)
    console.print(
        f"{more} other changes were estimated, {len(found.left_out)} left out: --json has all", highlight=False
    )


def _stages(found: Explanation) -> Table:
    table = Table("stage", title="stages, for one microbatch")
    for column in ("pipe rank", "parameters", "on each rank, MB", "forward, ms", "backward, ms", "waiting, ms"):
        table.add_column(column, justify="right")
    table.add_column("once per step, ms", justify="right")
    for each in found.stages:
        name = f"{each.stage}, from {each.opened_by}" if each.opened_by else str(each.stage)
        times = (each.forward_us, each.backward_us, each.exposed_us, each.once_us)
        size = f"{each.parameter_bytes / 1e6:,.1f}"
        table.add_row(name, str(each.pipe_rank), f"{each.num_parameters:,}", size, *map(_ms, times))
    return table


def _memory(found: Explanation) -> Table:
    kinds = [kind for kind in found.ranks[0].parts if any(each.parts[kind] for each in found.ranks)]
    table = Table("pipe rank", title=f"peak memory of a rank, MiB of {found.budget_bytes / 2**20:,.0f}")
    for column in ("peak", *kinds):
        table.add_column(column, justify="right")
    for each in found.ranks:
        sizes = (each.peak_bytes, *(each.parts[kind] for kind in kinds))
        table.add_row(str(each.pipe_rank), *(f"{size / 2**20:,.1f}" for size in sizes))
    return table


def _collectives(found: Explanation) -> Table:
    table = Table("layers", "collectives", "axis", title="collectives of each layer, for one microbatch")
    for column in ("number", "MB sent", "ms"):
        table.add_column(column, justify="right")
    for each in found.collectives[:_MOST_ROWS]:
        traffic = each.traffic
        figures = str(traffic.num_collectives), f"{traffic.bytes_sent / 1e6:,.2f}", _ms(traffic.time_us)
        table.add_row(_layers(each), each.kind, each.axis, *figures)
    _note_rest(table, len(found.collectives))
    return table


def _repeated(found: Explanation) -> Table:
    table = Table("modules", "along", title="computed alike by all ranks along tensor-parallel axes")
    table.add_column("wasted in a step, ms", justify="right")
    costly = [each for each in found.repeated if each.wasted_us >= _LEAST_SHARE * found.step_us]
    for each in costly[:_MOST_ROWS]:
        table.add_row(each.modules or "(the model itself)", " and ".join(each.axes), _ms(each.wasted_us))
    _note_rest(table, len(costly))
    return table


def _plan(found: Explanation) -> Table:
    table = Table("key", "style", "from", "hint", "parameters", "verdict", title="the plan that the model ships")
    for read in found.shipped_plan.entries:
        entry = read.entry
        table.add_row(entry.key, entry.style, entry.origin, read.hint, str(read.num_parameters), read.verdict)
    return table


def _parts(found: Explanation) -> Table:
    table = Table("part", title="what the step's time is spent on")
    for column in ("ms", "share"):
        table.add_column(column, justify="right")
    table.add_column("over")
    places = {f"exposed_{each.axis}": _network(each.num_hosts) for each in found.axes}
    for part in sorted(whole_parts(found.estimate), key=lambda part: -part.time_us):
        share = f"{part.time_us / found.step_us:.1%}"
        table.add_row(part.label, _ms(part.time_us), share, places.get(part.name, ""))
    table.add_section()
    table.add_row("the step", _ms(found.step_us), "100.0%", "")
    return table


def _proposals(found: Explanation) -> Table:
    table = Table("change", title="what would help most, each by itself")
    for column in ("step, ms", "gain", "peak, MiB"):
        table.add_column(column, justify="right")
    table.add_column("mostly")
    for each in found.proposals:
        peak = f"{each.estimate.peak_bytes / 2**20:,.1f}"
        table.add_row(each.change.text, _ms(each.step_us), f"{each.gain:.1%}", peak, each.reason)
    return table


def _layers(each: LayerCollectives) -> str:
    if not each.first:
        return "(outside of layers)"
    return each.first if each.num_layers == 1 else f"{each.first} to {each.last}"


def _network(num_hosts: int) -> str:
    return f"the network of {num_hosts} hosts" if num_hosts > 1 else "links inside a host"


def _note_rest(table: Table, count: int) -> None:
    if count > _MOST_ROWS:
        table.caption = f"{count - _MOST_ROWS} more: --json has all"


def _shown_schedule(schedule: str) -> str:
    return "a schedule of your own" if "\n" in schedule else schedule


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:,.3f}"
