"""One source stands for several, each under its own name."""

from __future__ import annotations

import re

import pytest

from fxpar.lowering.joint_source import can_be_joined, includes_of, join_sources

ONE = (
    '#include <a.h>\nextern "C" void kernel(float* out) {}\n#include <Python.h>\nPyMODINIT_FUNC PyInit_kernel(void) {}'
)
OTHER = ONE.replace("float", "int")


def test_the_source_before_and_after() -> None:
    lines = join_sources({"c1": ONE, "c2": OTHER}).splitlines()
    assert lines[:4] == ["#define PY_SSIZE_T_CLEAN", "#include <a.h>", "#include <Python.h>", "#include <cstring>"]
    assert lines[4:16] == [
        "#define kernel kernel_c1",
        "#define PyInit_kernel PyInit_kernel_c1",
        "namespace joint_c1 {",
        '#line 1 "c1.main.cpp"',
        "",
        'extern "C" void kernel(float* out) {}',
        "",
        "PyMODINIT_FUNC PyInit_kernel(void) {}",
        "}",
        "#undef kernel",
        "#undef PyInit_kernel",
        "#define kernel kernel_c2",
    ]
    entries = [line.strip() for line in lines if re.match(r'\s*\{"', line)]
    assert entries == ['{"c1.kernel", joint_c1::PyInit_kernel_c1},', '{"c2.kernel", joint_c2::PyInit_kernel_c2},']


def test_includes_are_found_wherever_they_are() -> None:
    assert includes_of(ONE) == ("#include <a.h>", "#include <Python.h>")
    assert includes_of("# include <b.h>\nint include;\n") == ("# include <b.h>",)


@pytest.mark.parametrize("line", ["#define SIZE 3", "  # undef SIZE", "#define PY_SSIZE_T_CLEANER"])
def test_a_source_with_macros_stays_alone(line: str) -> None:
    assert not can_be_joined(f"{ONE}\n{line}\n")


def test_inductors_own_macro_and_pragmas_change_nothing_for_others() -> None:
    assert can_be_joined(f"#define PY_SSIZE_T_CLEAN\n{ONE}\n#pragma omp parallel\n#ifdef A\n#endif")
