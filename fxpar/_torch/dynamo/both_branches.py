"""Branches on the values of tensors are traced as if they were taken, between two marks, one after the other.

Before: `if mask.any(): y[mask] = f(x[mask])`, where Dynamo would end the graph
After:  `begin_branch(mask.any(), True); y[mask] = f(x[mask]); end_branch()`

What is traced between the marks may change tensors in place, and let variables have other tensors, but it may change no
other object or variable that is read after it.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import LazyVariableTracker, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpar._torch.branches import begin_branch, end_branch, value_of_branch
from fxpar._torch.compiler import storage_of, traces_wider
from fxpar._torch.dynamo.jumps import Jump, change_jumps, truth_of_tensor


@functools.cache
def trace_both_branches() -> None:
    """Let Dynamo trace such branches, where it also traces numbers that are read from tensors."""
    change_jumps(_tracing)
    _note_changes()


def _tracing(jump: Jump, jumps_if: bool) -> Jump:
    """An instruction that jumps, but traces what both branches do, if they go on at one place."""

    def run(self: Any, inst: Instruction) -> None:
        condition = _condition(self.stack[-1]) if traces_wider() else None
        branch = None if condition is None else _branch(self, inst, condition.as_proxy(), jumps_if)
        if branch is None:
            return jump(self, inst)
        self.pop()
        branch.note(self)
        _begin(self, branch)
        return None

    return run


def _condition(condition: VariableTracker) -> VariableTracker | None:
    """A condition that depends on values of tensors; None for any other."""
    if isinstance(condition, SymNodeVariable):
        return condition if free_unbacked_symbols(condition.sym_num) else None
    return truth_of_tensor(condition)


@dataclass(eq=False, slots=True)
class _Before:
    """What there is where a branch begins: variables, values on the stack, and the ids of objects without a source.

    Of a branch that is traced as the second one, the variables are those that the first one leaves.

    changed: what has been changed of the objects.
    """

    variables: dict[str, VariableTracker] = field(default_factory=dict)
    depth: int = 0
    kept: list[VariableTracker] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)
    changed: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Branch:
    """The instructions that one branch runs.

    condition: what decides, and `holds` whether this branch is taken where it is true.
    start: the first instruction.
    ends: where it ends: where the other branch goes on, too, or where either returns.
    line: that of the condition.
    otherwise: the first instruction of the other branch, if that does something as well, and is traced next.
    returns: whether both end by returning a value.
    """

    condition: Any
    holds: bool
    start: int
    ends: Set[int]
    line: str
    otherwise: int | None = None
    returns: bool = False
    before: _Before = field(default_factory=_Before)

    def note(self, translator: Any) -> None:
        """Note what there is where the branch begins."""
        self.before = _Before(dict(translator.symbolic_locals), len(translator.stack))
        VariableTracker.visit(self.before.kept.append, list(_values(translator)))
        self.before.ids = {id(each) for each in self.before.kept}

    def change(self, item: VariableTracker, what: str) -> None:
        """Note a change of an object, if it is one that there was before."""
        if item.source is not None or id(item) in self.before.ids:
            self.before.changed.append(what)

    def leave(self, translator: Any) -> str | None:
        """End the branch; returns what it has changed that is no tensor, and that is read later, or None."""
        if self.before.changed or len(translator.stack) - self.before.depth not in self._possible_results():
            return ", ".join(self.before.changed) or "what it leaves to compute with"
        return None if self.otherwise is not None else _settle(translator, self.before.variables)

    def _possible_results(self) -> Collection[int]:
        """How many values it may leave on the stack, as the branches of an expression do: as many as the other one."""
        if self.otherwise is not None:
            return (1,) if self.returns else (0, 1)
        return (1,) if _RESULT in self.before.variables else (0,)

    def other(self, translator: Any) -> "_Branch":
        """The other branch, which begins with the variables that this one began with."""
        variables = dict(translator.symbolic_locals)
        if len(translator.stack) > self.before.depth:
            variables[_RESULT] = translator.pop()
        translator.symbolic_locals.clear()
        translator.symbolic_locals.update(self.before.variables)
        before = replace(self.before, variables=variables)
        assert self.otherwise is not None, "there is another branch"
        return replace(self, holds=not self.holds, start=self.otherwise, otherwise=None, before=before)


_RESULT = "the result"
"""The name, in place of a variable's, of a value that a branch leaves on the stack."""


def _settle(translator: Any, others: Mapping[str, VariableTracker]) -> str | None:
    """Let variables have the tensors that they have after the branch that is taken; returns which can't, or None."""
    now = translator.symbolic_locals
    for name, other in others.items():
        is_result = name == _RESULT
        after = translator.stack[-1] if is_result else now.get(name)
        if _is_same(other, after):
            continue
        if not is_result and not _is_read(translator, translator.instruction_pointer, name):
            continue
        chosen = _chosen(translator, after, other)
        if chosen is None:
            return name if is_result else f"the variable {name!r}"
        if is_result:
            translator.stack[-1] = chosen
        else:
            now[name] = chosen
    return None


def _chosen(translator: Any, after: VariableTracker | None, other: VariableTracker) -> VariableTracker | None:
    """A tensor that is `after` if the branch is taken, and `other` if not; None if they are no tensors."""
    tensors = [each.realize() if isinstance(each, LazyVariableTracker) else each for each in (after, other)]
    if not all(isinstance(each, TensorVariable) for each in tensors):
        return None
    proxies = tuple(each.as_proxy() for each in tensors if each is not None)
    if _are_the_same(*(proxy.node.meta["example_value"] for proxy in proxies)):
        return other
    chosen: VariableTracker = wrap_fx_proxy(
        translator, translator.output.create_proxy("call_function", value_of_branch, proxies, {})
    )
    return chosen


def _are_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether two fake tensors are the same elements of one memory, as those that an operation in place returns."""
    places = [(each.storage_offset(), each.shape, each.stride(), each.dtype) for each in (one, other)]
    return storage_of(one) == storage_of(other) and places[0] == places[1]


def _values(translator: Any) -> Iterator[Any]:
    """What the frames of a call have in variables and on their stacks."""
    while translator is not None:
        yield from translator.symbolic_locals.values()
        yield from translator.stack
        translator = translator.parent


def _is_same(before: VariableTracker, after: VariableTracker | None) -> bool:
    if after is None:
        return False
    before, after = (each.unwrap() if isinstance(each, LazyVariableTracker) else each for each in (before, after))
    if before is after:
        return True
    constants = before.is_python_constant() and after.is_python_constant()
    return constants and bool(before.as_python_constant() == after.as_python_constant())


def _branch(self: Any, inst: Instruction, condition: Any, jumps_if: bool) -> _Branch | None:
    """The branch to trace first, if both go on at one place; the other one may do nothing."""
    line = f"{self.f_code.co_filename}:{inst.positions.lineno if inst.positions else 'an unknown line'}"
    next_place, target = self.instruction_pointer, self.indexof[inst.target]
    for ends in _meetings(self, next_place, target):
        if _leads_to(self, next_place, ends) and _leads_to(self, target, ends):
            if _next_that_acts(self, next_place) in ends:
                return _Branch(condition, jumps_if, target, ends, line)
            does_nothing = _next_that_acts(self, target) in ends
            returns = self.instructions[min(ends)].opname == "RETURN_VALUE"
            return _Branch(
                condition, not jumps_if, next_place, ends, line, None if does_nothing else target, returns=returns
            )
    return None


def _meetings(self: Any, one: int, other: int) -> Iterator[Set[int]]:
    """Where two ways may meet: places that both lead to, the nearest first; and any return of a value, or any other."""
    of_other = {*_walk(self, other)}
    yield from ({place} for place in _walk(self, one) if place in of_other)
    for name in ("RETURN_VALUE", "RETURN_CONST"):
        yield {place for place, inst in enumerate(self.instructions) if inst.opname == name} or {-1}


_ENDS = ("RETURN", "RAISE", "RERAISE")

_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")


def _next_that_acts(self: Any, place: int) -> int:
    """The first instruction from `place` on that does more than to jump."""
    seen: set[int] = set()
    while place not in seen:
        seen.add(place)
        inst = self.instructions[place]
        if inst.opname in _ALWAYS_JUMPS:
            place = self.indexof[inst.target]
        elif inst.opname == "NOP":
            place += 1
    return place


def _leads_to(self: Any, start: int, ends: Set[int]) -> bool:
    """Whether the ways from `start` that do not raise lead to one of `ends`: none returns or yields before."""
    found = {*_walk(self, start, ends.__contains__)}
    leaves = any(self.instructions[place].opname.startswith(("RETURN", "YIELD")) for place in found - ends)
    return not leaves and not found.isdisjoint(ends)


def _is_read(self: Any, start: int, name: str) -> bool:
    """Whether a way from `start` leads to where a local variable is read, or deleted, before it is assigned again.

    Dynamo's own analysis says so of any that is read on a way that has a branch.
    """

    def uses(place: int) -> bool:
        inst = self.instructions[place]
        return "FAST" in inst.opname and name in (inst.argval if isinstance(inst.argval, tuple) else (inst.argval,))

    used = (self.instructions[place].opname for place in _walk(self, start, uses) if uses(place))
    return any(opname.replace("STORE_FAST", "").strip("_") for opname in used)


def _walk(self: Any, start: int, is_end: Callable[[int], bool] = lambda place: False) -> Iterator[int]:
    """The places that the ways from `start` lead to, the nearest first, up to those that are ends."""
    found = {start}
    for place in (places := [start]):
        yield place
        for each in () if is_end(place) else _next(self, place):
            if each not in found:
                found.add(each)
                places.append(each)


def _next(self: Any, place: int) -> Iterator[int]:
    """Where the instruction may go on."""
    inst = self.instructions[place]
    if inst.target is not None:
        yield self.indexof[inst.target]
    if inst.opname not in _ALWAYS_JUMPS and not inst.opname.startswith(_ENDS):
        yield place + 1


_OPEN = "open_branches"
"""The attribute of Dynamo's `OutputGraph` that has the branches that are being traced."""


def _begin(self: Any, branch: _Branch) -> None:
    """Trace the branch, and end it before the instruction where the other one goes on."""
    self.output.create_proxy("call_function", begin_branch, (branch.condition, branch.holds), {})
    setattr(self.output, _OPEN, [*getattr(self.output, _OPEN, ()), branch])
    self.instruction_pointer = branch.start
    step = self.step

    def watching() -> bool:
        if self.instruction_pointer not in branch.ends:
            went_on: bool = step()
            return went_on
        self.step = step
        _end(self, branch)
        return bool(self.step())

    self.step = watching


def _end(self: Any, branch: _Branch) -> None:
    getattr(self.output, _OPEN).remove(branch)
    if (problem := branch.leave(self)) is not None:
        unimplemented(
            gb_type="Data-dependent branching",
            context=problem,
            explanation=f"A tensor decides whether the branch at {branch.line} changes {problem}.",
            hints=["Compute both, and choose by torch.where, or branch by torch.cond."],
        )
    self.output.create_proxy("call_function", end_branch, (), {})
    if branch.otherwise is not None:
        _begin(self, branch.other(self))


def _note_changes() -> None:
    """Let open branches know what of the objects that there were before is changed."""
    mutation, store_attr, store_cell, store_global = (
        SideEffects.mutation,
        SideEffects.store_attr,
        SideEffects.store_cell,
        SideEffects.store_global,
    )

    def changing(self: SideEffects, var: VariableTracker) -> None:
        _note(self, var, "a container")
        mutation(self, var)

    def storing_attr(self: SideEffects, item: VariableTracker, name: str, *args: Any, **kwargs: Any) -> None:
        _note(self, item, f"the attribute {name!r}")
        store_attr(self, item, name, *args, **kwargs)

    def storing_cell(self: SideEffects, cellvar: VariableTracker, value: VariableTracker) -> None:
        _note(self, cellvar, "a variable of a closure")
        store_cell(self, cellvar, value)

    def storing_global(self: SideEffects, gvar: VariableTracker, name: str, value: VariableTracker) -> None:
        _note(self, gvar, f"the global variable {name!r}")
        store_global(self, gvar, name, value)

    SideEffects.mutation = changing  # type: ignore[method-assign]
    SideEffects.store_attr = storing_attr  # type: ignore[method-assign]
    SideEffects.store_cell = storing_cell  # type: ignore[method-assign]
    SideEffects.store_global = storing_global  # type: ignore[method-assign]


def _note(effects: SideEffects, item: VariableTracker, what: str) -> None:
    for branch in getattr(effects.output_graph_weakref(), _OPEN, ()):
        branch.change(item, what)
