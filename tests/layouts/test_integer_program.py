"""Small programs whose solution is plain to see, or is found by trying all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.layouts.integer_program import IntegerProgram


def test_the_cheapest_choice_that_meets_the_rows_is_found() -> None:
    program = IntegerProgram()
    cheap, expensive, needed = (
        program.variable(1.0, integral=True),
        program.variable(3.0, integral=True),
        program.variable(),
    )
    program.equal([(cheap, 1), (expensive, 1)], 1)
    program.at_least([(expensive, 1), (needed, -1)], 0)
    assert program.solve() == [1, 0, 0]
    program.at_least([(needed, 1)], 0.5)
    assert program.solve() == [0, 1, 0.5]


def test_costs_add_up() -> None:
    program = IntegerProgram()
    first, second = program.variable(1.0, integral=True), program.variable(2.0, integral=True)
    program.equal([(first, 1), (second, 1)], 1)
    program.add_cost(first, 2.0)
    assert program.solve() == [0, 1]


def test_rows_that_contradict_each_other_have_no_solution() -> None:
    program = IntegerProgram()
    x = program.variable()
    program.equal([(x, 1)], 1)
    program.equal([(x, 1)], 0)
    assert program.solve() is None


def test_what_whole_variables_cannot_meet_has_no_solution() -> None:
    """Halves would."""
    program = IntegerProgram()
    first, second, third = (program.variable(integral=True) for _ in range(3))
    for one, other in ((first, second), (second, third), (third, first)):
        program.equal([(one, 1), (other, 1)], 1)
    assert program.solve() is None


def test_the_relaxation_may_use_nothing_that_is_whole() -> None:
    """Halves of the cheap ones cover all rows, whole ones of them do not."""
    program = IntegerProgram()
    cheap = [program.variable(1.0, integral=True) for _ in range(3)]
    expensive = program.variable(2.5, integral=True)
    for one, other in itertools.combinations(cheap, 2):
        program.equal([(one, 1), (other, 1), (expensive, 1)], 1)
    assert program.solve() == pytest.approx([0, 0, 0, 1])


def test_a_solution_that_need_not_be_proved_optimal_meets_all_rows() -> None:
    """Halves cover 80 triangles at three quarters of the least cost."""
    program = IntegerProgram()
    triangles = [[program.variable(1.0, integral=True) for _ in range(3)] for _ in range(80)]
    pairs = [pair for triangle in triangles for pair in itertools.combinations(triangle, 2)]
    for one, other in pairs:
        program.at_least([(one, 1), (other, 1)], 1)
    found = program.solve()
    assert found is not None
    assert all(round(found[one]) + round(found[other]) >= 1 for one, other in pairs)
    assert sum(found) == pytest.approx(160)


@settings(max_examples=200, deadline=None)
@given(
    costs=st.lists(st.integers(0, 20), min_size=7, max_size=7),
    covers=st.lists(st.sets(st.integers(0, 6), min_size=2, max_size=4), min_size=3, max_size=8),
)
def test_the_cheapest_of_all_whole_solutions_is_found(costs: list[int], covers: list[set[int]]) -> None:
    """Covers of sets, whose relaxation is seldom whole."""
    program = IntegerProgram()
    for cost in costs:
        program.variable(float(cost), integral=True)
    for cover in covers:
        program.at_least([(x, 1) for x in sorted(cover)], 1)
    found = program.solve()
    assert found is not None
    least = min(
        sum(cost for cost, x in zip(costs, chosen, strict=True) if x)
        for chosen in itertools.product((0, 1), repeat=7)
        if all(any(chosen[x] for x in cover) for cover in covers)
    )
    assert sum(cost * x for cost, x in zip(costs, found, strict=True)) == pytest.approx(least, abs=1e-3)
    assert all(sum(found[x] for x in cover) >= 1 - 1e-6 for cover in covers)
