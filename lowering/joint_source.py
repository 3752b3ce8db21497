"""One translation unit from the C++ sources of several kernels, so that their headers are parsed once.

Each source is that of a Python extension module with one function, as Inductor writes it: includes, the function
`kernel` with C linkage, and its binding `PyInit_kernel`. All kernels have these two names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)
_MACRO = re.compile(r"^\s*#\s*(?:define|undef)\s+(?!PY_SSIZE_T_CLEAN\b)", re.MULTILINE)


def includes_of(source: str) -> tuple[str, ...]:
    """The lines of a source that include headers."""
    return tuple(_INCLUDE.findall(source))


def can_be_joined(source: str) -> bool:
    """Whether a source leaves those behind it as they are: it defines no macros."""
    return _MACRO.search(source) is None


def join_sources(sources: Mapping[str, str]) -> str:
    """The source of one extension module that stands for several, told apart by the name that it is imported under.

    Imported as `KEY.kernel`, it is the module of the source at KEY. Sources stay as they are, each in a namespace of
    its own and with its own entry points; what they include stands in front of all of them.

    Before: {"c1": `#include <a.h>`, kernel, PyInit_kernel; "c2": `#include <a.h>`, kernel, PyInit_kernel}
    After:  `#include <a.h>`; namespace c1 with kernel_c1, PyInit_kernel_c1; namespace c2 with kernel_c2,
            PyInit_kernel_c2; PyInit_kernel, which calls PyInit_kernel_c1 or PyInit_kernel_c2

    Args:
        sources: by key, an identifier. All include the same headers, and all can be joined.
    """
    (includes,) = {includes_of(source) for source in sources.values()}
    entries = "\n".join(f'    {{"{key}.kernel", joint_{key}::PyInit_kernel_{key}}},' for key in sources)
    return "\n".join(
        [
            "#define PY_SSIZE_T_CLEAN",
            *includes,
            "#include <cstring>",
            *(_in_namespace(key, source) for key, source in sources.items()),
            _MODULE.replace("ENTRIES", entries),
        ]
    )


def _in_namespace(key: str, source: str) -> str:
    names = ("kernel", "PyInit_kernel")
    renamed = "\n".join(f"#define {name} {name}_{key}" for name in names)
    restored = "\n".join(f"#undef {name}" for name in names)
    return f'{renamed}\nnamespace joint_{key} {{\n#line 1 "{key}.main.cpp"\n{_INCLUDE.sub("", source)}\n}}\n{restored}'


# A module that is initialised in several phases learns the name that it is imported under (PEP 489).
_MODULE = """
namespace {

struct Entry {
    const char* name;
    PyObject* (*make)();
};

const Entry entries[] = {
ENTRIES
};

PyObject* make_module(PyObject* spec, PyModuleDef*) {
    PyObject* name = PyObject_GetAttrString(spec, "name");
    const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8(name);
    PyObject* module = nullptr;
    if (text != nullptr) {
        for (const Entry& entry : entries) {
            if (std::strcmp(entry.name, text) == 0) {
                module = entry.make();
            }
        }
        if (module == nullptr && !PyErr_Occurred()) {
            PyErr_Format(PyExc_ImportError, "this library has no kernel named %R", name);
        }
    }
    Py_XDECREF(name);
    return module;
}

PyModuleDef_Slot joint_slots[] = {
    {Py_mod_create, reinterpret_cast<void*>(make_module)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr}};

PyModuleDef joint_module = {
    PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, joint_slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_kernel() {
    return PyModuleDef_Init(&joint_module);
}
"""
