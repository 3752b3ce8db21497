"""The code of all regions that a process lowers is generated after the last, and ranks of a host share this work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torch import Tensor

from fxpar.cache.derive_once import find, keep
from fxpar.hardware.machine import num_processors
from fxpar.lowering.compile_kernels import Gather
from fxpar.lowering.kept_code import Source, code_question, find_code, keep_code
from fxpar.lowering.stitch import Compiled
from fxpar.progress.phases import phase


@dataclass(eq=False, slots=True)
class _DeferredCode:
    """Stands for the code of a region, which is there when the `joint_generation` has ended."""

    question: str
    source: Source
    make: Callable[[Source], Compiled]
    function: Compiled | None = None

    @property
    def digest(self) -> str:
        """The question, shorter."""
        return sha256(self.question.encode()).hexdigest()

    def __call__(self, box: list[Tensor]) -> Sequence[Any]:
        assert self.function is not None, "a region was called before its code was generated"
        return self.function(box)

    def find(self) -> bool:
        """Load the code if a process has kept it; returns whether one has."""
        self.function = find_code(self.question)
        return self.function is not None

    def generate(self) -> None:
        """Generate the code, and keep it."""
        self.function = self.make(self.source)
        keep_code(self.question, self.function)


_deferred: ContextVar[dict[str, _DeferredCode] | None] = ContextVar("code to be generated, by question", default=None)


@contextmanager
def joint_generation(place: int = 0, gather: Gather = lambda own: [own]) -> Iterator[None]:
    """Code that is deferred within is generated at the end. Within another, this one does nothing.

    Processes of a machine do this at the same time. No more of them generate code than it has processors, since
    Inductor's import takes as long as the code of several regions; these generate what others need, too. Each process
    must call `gather` three times, whatever it lacks: so must processes of other machines that take part in it.

    Args:
        place: of this process among those of this machine.
        gather: returns what each process passes to it, by their places.

    Raises:
        what the generation raises, in every process that needs the code.
    """
    if _deferred.get() is not None:
        yield
        return
    deferred: dict[str, _DeferredCode] = {}
    before = _deferred.set(deferred)
    try:
        yield
    finally:
        _deferred.reset(before)
    _generate_all(deferred.values(), place, gather)


def deferred_code(question: str, source: Source, generate: Callable[[Source], Compiled]) -> Compiled:
    """What `generate` will have returned, here or elsewhere, at the end of the `joint_generation`.

    Args:
        question: all that the code depends on, as text.
        source: what it is the code of; it is sent to another process if that generates the code.
        generate: the same function in all processes; one of them calls it, if its result can be kept.
    """
    deferred = _deferred.get()
    assert deferred is not None, "code is deferred within a joint generation only"
    return deferred.setdefault(question, _DeferredCode(question, source, generate))


def _generate_all(codes: Iterable[_DeferredCode], place: int, gather: Gather) -> None:
    missing = {code.digest: code for code in codes if not code.find()}
    lacking = gather({digest: len(code.question) for digest, code in missing.items()})
    shares = _shares(lacking, num_processors())
    _publish_sources(missing, lacking, shares, place)
    gather(None)  # so that all sources are there
    share = shares.get(place, ())
    for number, digest in enumerate(share, start=1):
        # Below, every process that needs the code raises what is suppressed here.
        with phase(f"generate code, region {number} of {len(share)}"), suppress(Exception):
            _generate_for_all(digest, missing)
    gather(None)  # so that all code is there
    for code in missing.values():
        if code.function is None and not code.find():
            code.generate()


def _shares(lacking: Sequence[Mapping[str, int]], most: int) -> dict[int, list[str]]:
    """What each of at most `most` processes generates, of about the same size in total.

    Args:
        lacking: what each process lacks, and its size.
    """
    able = [place for place, own in enumerate(lacking) if own]
    places = [able[i * len(able) // most] for i in range(most)] if len(able) > most else able
    shares: dict[int, list[str]] = {place: [] for place in places}
    sizes = {digest: size for own in lacking for digest, size in own.items()}
    for digest in sorted(sizes, key=lambda digest: (-sizes[digest], digest)):

        def preference(place: int, digest: str = digest) -> tuple[int, bool]:
            return sum(sizes[each] for each in shares[place]), digest not in lacking[place]

        shares[min(places, key=preference)].append(digest)
    return shares


def _publish_sources(
    missing: Mapping[str, _DeferredCode],
    lacking: Sequence[Mapping[str, int]],
    shares: Mapping[int, Sequence[str]],
    place: int,
) -> None:
    """Keep the sources that other processes generate code for but lack; the first process that has one does this."""
    for generator, share in shares.items():
        for digest in share:
            if digest not in lacking[generator] and place == next(i for i, own in enumerate(lacking) if digest in own):
                keep(_published(digest), missing[digest].source)


def _generate_for_all(digest: str, missing: Mapping[str, _DeferredCode]) -> None:
    if digest in missing:
        missing[digest].generate()
        return
    source: Source | None = find(_published(digest))
    question = None if source is None else code_question(source)
    if source is not None and question is not None:
        make = next(iter(missing.values())).make  # a process that lacks nothing has no share
        code = _DeferredCode(question, source, make)
        if code.digest == digest:  # or Inductor has other options here
            code.generate()


def _published(digest: str) -> str:
    return f"the source of {digest}"
