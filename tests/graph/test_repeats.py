"""Repeats of a sequence: the ones that save most, cut where it costs least."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxpar.graph.repeats import Repeat, find_repeats


def repeats(text: str, smallest: int = 2, cheap: set[int] | None = None) -> list[Repeat]:
    prices = [0 if cheap and position in cheap else 1 for position in range(len(text) + 1)]
    return find_repeats([ord(letter) for letter in text], prices, smallest)


def test_layers_are_found_between_what_comes_before_and_after() -> None:
    assert repeats("<<abcabcabc>>") == [Repeat(2, 3, 3)]


def test_what_stands_once_is_no_repeat() -> None:
    assert repeats("abcdef") == []
    assert repeats("") == []


def test_the_shortest_period_is_taken() -> None:
    assert repeats("abababab") == [Repeat(0, 2, 4)]


def test_pieces_are_no_smaller_than_asked() -> None:
    assert repeats("abababab", smallest=3) == [Repeat(0, 4, 2)]
    assert repeats("ababab", smallest=3) == []


def test_the_repeat_that_saves_most_comes_first_and_others_share_what_is_left() -> None:
    assert repeats("ababab" + "-" + "wxyzwxyzwxyz" + "+" + "cdcd") == [
        Repeat(0, 2, 3),
        Repeat(7, 4, 3),
        Repeat(20, 2, 2),
    ]


def test_cuts_are_laid_where_they_cost_least() -> None:
    assert repeats("cabcabcabca", cheap={1, 4, 7, 10}) == [Repeat(1, 3, 3)]
    assert repeats("cabcabcabca", cheap={2, 5, 8, 11}) == [Repeat(2, 3, 3)]


@given(st.text("abc", max_size=40), st.integers(1, 5))
def test_pieces_are_equal_disjoint_and_large_enough(text: str, smallest: int) -> None:
    end = 0
    for repeat in repeats(text, smallest):
        assert repeat.start >= end and repeat.stop <= len(text)
        assert repeat.period >= smallest and repeat.count >= 2
        starts = range(repeat.start, repeat.stop, repeat.period)
        assert len({text[start : start + repeat.period] for start in starts}) == 1
        end = repeat.stop
