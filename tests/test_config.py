"""Options come from the call first, then from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpar.config import read_options


@pytest.mark.parametrize("given", [None, {}, {"dump": None}])
def test_the_environment_says_where_to_dump_where_the_options_do_not(
    given: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FXPAR_DUMP", raising=False)
    assert read_options(given).dump is None
    monkeypatch.setenv("FXPAR_DUMP", "there")
    assert read_options(given).dump == Path("there")
    assert read_options({"dump": "here"}).dump == Path("here")
