"""Compile many small C++ kernels in few runs of the compiler, most of whose time goes into headers and linking."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from fxpar._torch.cpp import CppKernel, KernelFiles, build_cpp_library
from fxpar.hardware.machine import num_processors
from fxpar.lowering.joint_source import can_be_joined, includes_of, join_sources
from fxpar.lowering.machine_lock import machine_lock, shared_folder, try_machine_lock

UNIT_CHARS = 250_000
"""The size of sources that take as long to compile as their headers: a translation unit of less is not worth its cost.

With GCC 12, headers and linking take 1.7 s, and a kernel, of 8,000 characters with its binding, 0.05 s.
"""


SHARED_UNIT_CHARS = UNIT_CHARS // 8
"""The same where other processors would be idle: all end sooner if each compiles headers and a few kernels."""

Gather: TypeAlias = Callable[[Any], Sequence[Any]]
"""Returns what each process of this machine passes to it; it may be a collective with other machines's, too."""


def compile_kernels(kernels: Sequence[CppKernel], max_compilers: int) -> None:
    """Compile those of `kernels` that nobody has compiled, or compiles now, and wait for the others.

    Each result is put where Inductor looks for it. What cannot be compiled together with others is compiled alone, and
    what cannot be compiled at all is left to Inductor, which raises the error when it loads the kernel.

    Processes of this machine may do this at the same time: each claims the kernels that no other has claimed, and
    compiles them. It waits for others when it has no claims.

    Args:
        kernels: in any order.
        max_compilers: run at most this many compilers at once.
    """
    missing = _missing(kernels)
    while missing:
        with ExitStack() as claims:
            claimed = _claim(missing, claims)
            failed = _compile(claimed, max_compilers)
            _run_at_once([kernel.compile_alone for kernel in failed], max_compilers)
        if not claimed:
            with machine_lock(shared_folder(), missing[0].key):  # which is released when it is compiled, or cannot be
                pass
        done = {kernel.key for kernel in claimed}
        missing = _missing(kernel for kernel in missing if kernel.key not in done)


def compile_in_parts(kernels: Sequence[CppKernel], place: int, gather: Gather) -> None:
    """Compile a part of the kernels that processes of this machine lack, while others compile the other parts.

    Each must call this at the same time, and calls `gather` twice, whatever it lacks: so must processes of other
    machines that take part in it. A process may compile kernels that only others need: so there are no more runs of the
    compiler than processors. What is missing afterwards is left to `compile_kernels`.

    Args:
        kernels: those that this process needs.
        place: of this process among them.
        gather: returns what each process passes to it, by their places.
    """
    own = {kernel.files: kernel for kernel in _missing(kernels)}
    of_all = gather(list(own))
    lacking = sorted({files for found in of_all for files in found})
    # A process with no other beside it leaves all to `compile_kernels`, which occupies every processor.
    units = _units(lacking, min(len(of_all), num_processors()), SHARED_UNIT_CHARS) if len(of_all) > 1 else []
    like = {kernel.command: kernel for kernel in own.values()}
    unit = units[place] if place < len(units) else []
    with ExitStack() as claims:
        part = [own.get(files) or like[files.command].with_files(files) for files in unit if files.command in like]
        claimed = _claim(part, claims)
        gather(None)  # so that nobody claims a kernel of another part
        if len(claimed) > 1:
            _compile_unit(claimed)


def _missing(kernels: Iterable[CppKernel]) -> list[CppKernel]:
    """Those that nobody has compiled, by name."""
    return sorted((kernel for kernel in kernels if not kernel.library.exists()), key=lambda kernel: kernel.key)


def _claim(kernels: Sequence[CppKernel], claims: ExitStack) -> list[CppKernel]:
    """Claim the kernels that no other process has claimed, all at once: otherwise several would get a few each."""
    with machine_lock(shared_folder(), "claim kernels"):
        claimed = [kernel for kernel in kernels if try_machine_lock(shared_folder(), kernel.key, claims)]
    return _missing(claimed)


def _compile(kernels: Sequence[CppKernel], max_compilers: int) -> list[CppKernel]:
    """Compile together what can be; returns the kernels that are yet to be compiled alone."""
    known = {kernel.files: kernel for kernel in kernels}
    units = [
        [known[files] for files in unit] for unit in _units(list(known), max_compilers, UNIT_CHARS) if len(unit) > 1
    ]
    for result in _run_at_once([partial(_compile_unit, unit) for unit in units], max_compilers):
        result.result()
    return _missing(kernels)


def _run_at_once(tasks: Sequence[Callable[[], None]], max_threads: int) -> list[Future[None]]:
    """Run tasks that mostly wait for other processes, with this thread's context, which holds Inductor's options."""
    with ThreadPoolExecutor(max_threads) as pool:
        return [pool.submit(copy_context().run, task) for task in tasks]


def _units(kernels: Sequence[KernelFiles], max_units: int, unit_chars: int) -> list[list[KernelFiles]]:
    """Kernels to compile in one run each: with equal commands and headers, and of about the same size in total."""
    sources = {kernel: Path(kernel.source).read_text() for kernel in kernels}

    def kind(kernel: KernelFiles) -> tuple[str, tuple[str, ...], str]:
        alone = "" if can_be_joined(sources[kernel]) else kernel.library
        return kernel.command, includes_of(sources[kernel]), alone

    units: list[list[KernelFiles]] = []
    for _, group in groupby(sorted(kernels, key=kind), kind):
        largest_first = sorted(group, key=lambda kernel: (-len(sources[kernel]), kernel))
        num_chars = sum(len(sources[kernel]) for kernel in largest_first)
        parts: list[list[KernelFiles]] = [[] for _ in range(max(1, min(max_units, num_chars // unit_chars)))]
        for kernel in largest_first:
            min(parts, key=lambda part: sum(len(sources[each]) for each in part)).append(kernel)
        units += parts
    return units


def _compile_unit(kernels: Sequence[CppKernel]) -> None:
    """Compile all in one library, and put it where the library of each is expected, unless the compiler fails."""
    with TemporaryDirectory(dir=shared_folder()) as folder:
        source = Path(folder, "kernels.cpp")
        source.write_text(join_sources({kernel.key: kernel.source.read_text() for kernel in kernels}))
        library = build_cpp_library(source, kernels[0].options)
        if library is not None:
            for kernel in kernels:
                with kernel.lock():  # no compiler is to overwrite the file, nor a process to read half of a copy
                    _put(library, kernel.library)


def _put(library: Path, place: Path) -> None:
    """Make `place` another name of the file `library`; a copy where the file system has no such names."""
    try:
        os.link(library, place)
    except FileExistsError:
        pass
    except OSError:
        copy = place.with_name(f"{place.name}.{os.getpid()}")
        shutil.copy(library, copy)
        copy.replace(place)
