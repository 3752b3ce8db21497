"""Small programs whose solution is plain to see."""

from __future__ import annotations

from fxpar.layouts.integer_program import IntegerProgram


def test_the_cheapest_choice_that_meets_the_rows_is_found() -> None:
    program = IntegerProgram()
    cheap, dear, needed = program.variable(1.0, integral=True), program.variable(3.0, integral=True), program.variable()
    program.equal([(cheap, 1), (dear, 1)], 1)
    program.at_least([(dear, 1), (needed, -1)], 0)
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
