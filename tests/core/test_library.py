"""A native core that is missing or too old is an error that says what to run."""

from __future__ import annotations

from ctypes.util import find_library
from pathlib import Path

import pytest

from fxpar.core.library import function
from fxpar.errors import CoreNotBuiltError


def test_a_missing_library_says_to_run_make_install(tmp_path: Path) -> None:
    with pytest.raises(CoreNotBuiltError, match=r"nowhere\.so.*make install"):
        function("fxpar_philox_block", None, library=tmp_path / "nowhere.so")


def test_a_library_without_the_function_says_to_run_make_install() -> None:
    other_library = find_library("m")
    assert other_library is not None
    with pytest.raises(CoreNotBuiltError, match=r"fxpar_philox_block.*make install"):
        function("fxpar_philox_block", None, library=Path(other_library))
