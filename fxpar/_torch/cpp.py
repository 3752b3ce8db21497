"""The private PyTorch names behind Inductor's C++ kernels."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from unittest.mock import patch

import torch

T = TypeVar("T")

__all__ = [
    "CppKernel",
    "DeferredKernel",
    "KernelFiles",
    "build_cpp_library",
    "cpu_and_compiler",
    "cpu_vector_isa",
    "deferred_cpp_kernels",
    "examine_isa",
    "generated_code",
    "inductor_options",
    "isa_with",
    "load_generated_code",
]

# The functions below import inside their bodies: these modules take seconds to import, and are not always needed.


@dataclass(frozen=True, slots=True)
class CppKernel:
    """A C++ kernel whose library is not in Inductor's cache, and what Inductor would do to compile it."""

    source: Path
    library: Path
    lock_path: str
    compile_alone: Callable[[], None] = field(compare=False)
    """Compiles it as Inductor does, unless that has been done. It raises CppCompileError."""
    options: Any = field(compare=False)

    @property
    def key(self) -> str:
        """An identifier; the module with the kernel, the function `kernel`, is imported as `KEY.kernel`."""
        return self.library.name.partition(".")[0]

    @property
    def command(self) -> str:
        """The command that compiles it, without the names of files."""
        from torch._inductor.cpp_builder import CppBuilder

        command: str = CppBuilder("library", "source", self.options).get_command_line()
        return command

    @property
    def files(self) -> "KernelFiles":
        """What another process of this machine needs to know of it."""
        return KernelFiles(str(self.source), str(self.library), self.lock_path, self.command)

    def with_files(self, files: "KernelFiles") -> "CppKernel":
        """Another process's kernel, to be compiled by the same command as this one, and alone by that process only."""
        return CppKernel(Path(files.source), Path(files.library), files.lock_path, lambda: None, self.options)

    def lock(self) -> AbstractContextManager[Any]:
        """The lock among all processes under which Inductor looks whether the library is there, and compiles it."""
        from torch.utils._filelock import FileLock

        return FileLock(self.lock_path)


@dataclass(frozen=True, slots=True, order=True)
class KernelFiles:
    """The files of a `CppKernel`, in Inductor's cache, and its command."""

    source: str
    library: str
    lock_path: str
    command: str


def build_cpp_library(source: Path, options: Any) -> Path | None:
    """Compile `source` with the options of a `CppKernel`.

    Returns:
        The shared object, which is beside the source; None if the compiler failed.
    """
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.exc import CppCompileError

    builder = CppBuilder(source.stem, str(source), options, str(source.parent))
    try:
        builder.build()
    except CppCompileError:
        return None
    return Path(builder.get_target_file_path())


@dataclass(eq=False, slots=True)
class DeferredKernel:
    """Stands for a C++ kernel in the modules that call it, until `load` puts the kernel there. A call loads it, too."""

    function: Callable[[], Callable[..., Any]]
    """Loads the kernel. If its library is missing, it is compiled before, alone."""
    missing: CppKernel | None = None
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def __call__(self, *args: Any) -> Any:
        return self.function()(*args)

    def load(self) -> None:
        """Load the kernel.

        Raises:
            CppCompileError: its library was missing, and the compiler failed.
            ImportError: its library cannot be loaded.
        """
        function = self.function()
        for scope, name in self.places:
            scope[name] = function


_deferred: ContextVar[list[DeferredKernel] | None] = ContextVar("deferred C++ kernels", default=None)


@contextmanager
def deferred_cpp_kernels() -> Iterator[list[DeferredKernel]]:
    """Within, in this thread, modules that Inductor generates get a `DeferredKernel` for each C++ kernel.

    Their headers are not precompiled: that takes longer than it saves in a few runs of the compiler.
    """
    _let_kernels_be_deferred()
    found: list[DeferredKernel] = []
    before = _deferred.set(found)
    try:
        yield found
    finally:
        _deferred.reset(before)


@cache
def _let_kernels_be_deferred() -> None:
    """Replace the two methods that generated modules call to start compiling C++ kernels, and to wait for them all."""
    from torch._inductor.async_compile import AsyncCompile

    compile_now, wait_now = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        deferred = _deferred.get()
        if deferred is None:
            return compile_now(self, argtypes, source_code)
        deferred.append(_defer(argtypes, source_code))
        return deferred[-1]

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        for name, value in scope.items():
            if isinstance(value, DeferredKernel):
                value.places.append((scope, name))
        wait_now(self, scope)

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    AsyncCompile.wait = wait  # type: ignore[method-assign]


def _defer(argtypes: list[str], source_code: str) -> DeferredKernel:
    """What AsyncCompile.cpp_pybinding does, but nothing is compiled yet."""
    from torch._inductor.async_compile import kernel_code_log

    missing: list[CppKernel] = []

    def submit(compile_alone: Any) -> Future[None]:  # called if the cache lacks the library
        lock_path, (builder,) = compile_alone.args
        library = Path(builder.get_target_file_path())
        source = library.with_suffix(".cpp")
        missing.append(CppKernel(source, library, lock_path, compile_alone, builder._build_option))
        done: Future[None] = Future()  # Inductor waits for it, and then compiles the library if it is still missing
        done.set_result(None)
        return done

    kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
    function = _kernel_cache().load_pybinding_async(argtypes, source_code, submit_fn=submit)
    return DeferredKernel(function, missing[0] if missing else None)


@cache
def _kernel_cache() -> Any:
    """Inductor's cache of kernels, but without precompiled headers."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    class WithoutPrecompiledHeader(CppPythonBindingsCodeCache):
        @classmethod
        def _get_uncompiled_header(cls, device: str) -> str | None:
            return None

    return WithoutPrecompiledHeader


def cpu_and_compiler() -> str:
    """All that the vector instructions to use depend on: the CPU, the compiler, and Inductor's options for them."""
    from torch._inductor import config, cpu_vec_isa

    found = cpu_vec_isa.x86_isa_checker(), config.cpp.simdlen, config.cpp.vec_isa_ok
    return f"{cpu_vec_isa._get_isa_dry_compile_fingerprint('')} {found}"


def examine_isa(isa: Any) -> dict[str, Any] | None:
    """What Inductor finds out of vector instructions when it compiles and loads programs; None if they do not run."""
    return {name: found for name, found in vars(isa).items() if isinstance(found, bool | str)} if isa else None


def isa_with(isa: Any, findings: Mapping[str, Any]) -> Any:
    """The same vector instructions with the findings of a test elsewhere, which is not repeated.

    The compiler's flags depend on them: without, kernels would be compiled again, under other names.
    """
    kind = type(isa)
    known: Any = type(kind.__name__, (kind,), {"__bool__": lambda self: True, "__hash__": kind.__hash__})()
    vars(known).update(findings)
    return known


@cache
def cpu_vector_isa(usable: Callable[[Any], Any]) -> Callable[[], Any]:
    """Inductor's function that returns the vector instructions to use on this CPU. Its first call takes seconds.

    That call compiles and loads test programs for every set of instructions that the CPU has, widest first, although
    all but the first that passes are seldom needed. From here on, others are tested when Inductor asks for them.

    Args:
        usable: tests a set; it returns the set, or one to use in its place, or None.
    """
    from torch._inductor import cpu_vec_isa

    known = cpu_vec_isa.x86_isa_checker()  # empty on other processors, where nothing changes
    candidates = [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= set(known)]
    if known and sys.platform in ("linux", "win32"):
        valid: Any = LazySequence(found for isa in candidates if (found := usable(isa)) is not None)
        cpu_vec_isa.valid_vec_isa_list = cache(lambda: valid)
    return cpu_vec_isa.pick_vec_isa


class LazySequence(Sequence[T]):
    """What an iterator returns; each item is taken when it, or one behind it, is asked for; by one thread at a time."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._taken: list[T] = []
        self._lock = Lock()

    def __getitem__(self, index: Any) -> Any:
        with self._lock:
            counted = isinstance(index, int) and index >= 0  # from the start; anything else needs all items
            self._taken.extend(islice(self._items, max(0, index + 1 - len(self._taken)) if counted else None))
        return self._taken[index]

    def __len__(self) -> int:
        return len(self[:])

    def __bool__(self) -> bool:
        return any(True for _ in self)


def inductor_options() -> str:
    """Inductor's options in this thread, and the threads and vector instructions that it uses on this CPU."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.utils import parallel_num_threads

    # Torch 2.15 imports all that generates code to describe the class of Inductor's choices, even where there is none.
    described = "torch._inductor.choices" in sys.modules or getattr(config, "inductor_choices_class", None)
    with patch.dict(vars(config), {} if described else {"_cache_config_serializer": None}):
        options = config.save_config_portable(ignore_private_configs=False)
    machine = f"{cpu_vec_isa.pick_vec_isa()} {cpu_and_compiler()} {parallel_num_threads()} threads"
    return f"{machine} {sorted(options.items(), key=str)}"


def generated_code(compiled: Any) -> str | None:
    """The Python module that Inductor generated for a graph, if that is all there is to it: no constants, only CPU.

    It does without the modules that generate code, if it can: their import takes a third of what PyTorch's takes.
    """
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(compiled, CompiledFxGraph) or set(compiled.device_types) != {"cpu"}:
        return None
    more = compiled.constants, compiled.torchbind_constants, compiled.inputs_to_check, compiled.partition_maps
    if any(more) or compiled.guards_expr not in (None, "True"):
        return None
    return _without_generators(compiled.source_code)


_IMPORTS_ALIGN = "from torch._inductor.codegen.memory_planning import _align as align"
_IMPORTS_KERNELS = "from torch._inductor.select_algorithm import extern_kernels"


def _without_generators(source: str) -> str:
    from torch._inductor.select_algorithm import extern_kernels

    source = source.replace(f"{_IMPORTS_ALIGN}\n", "") if not re.search(r"\balign\(", source) else source
    called = re.findall(r"\bextern_kernels\.(\w+)", source)
    if all(getattr(torch, name, None) is getattr(extern_kernels, name) for name in called):
        source = source.replace(_IMPORTS_KERNELS, "import torch as extern_kernels")
    return source


def load_generated_code(source: str) -> Callable[[list[Any]], Sequence[Any]]:
    """The function of a module that Inductor generated. It empties its list of arguments."""
    from torch._inductor.codecache import PyCodeCache

    key, path = PyCodeCache.write(source)
    call: Callable[[list[Any]], Sequence[Any]] = PyCodeCache.load_by_key_path(key, path).call
    return call
