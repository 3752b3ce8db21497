"""Servers that have imported what ranks need, and fork into ranks: ranks next to each other from different servers.

Each rank of a launcher has its own order of sets. Ranks forked from one process would all have the same order, and hide
bugs that depend on it; so each server has its own hash seed.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

_OWNER = "owner"
_STANDARD_STREAMS = (0, 1, 2)
_SERVE = "from fxpar.world.launch import serve_ranks; serve_ranks()"

_NUM_SERVERS = 5
"""Rank r is forked from server r modulo 5: neighbours along an axis of a mesh are 1, 2, 3, 4, 6, 8, ... ranks apart.
Each server takes seconds to start."""

_NOTED_S = 5.0
"""How long a server may take to record that a process has ended; it is slow where the CPUs are busy."""


class RankServers:
    """The servers, with their sockets in `folder`; each is started when a process is first asked of it.

    Several processes may use the servers of one folder. They end with the process that owns it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []  # kept, since nobody waits for them

    @classmethod
    def own(cls) -> RankServers:
        """Servers in a new folder, which this process owns."""
        folder = Path(tempfile.mkdtemp(prefix="fxpar-ranks-"))
        owner = socket.socket(socket.AF_UNIX)
        owner.bind(str(folder / _OWNER))
        owner.listen(128)  # servers connect, and the connection closes when this process ends
        atexit.register(_remove, folder, owner, os.getpid())
        return cls(folder)

    def fork(self, rank: int, preload: Sequence[str]) -> Connection:
        """A connection to a new process, which calls the function passed to `serve`, with this process's streams.

        Args:
            rank: decides which server forks it.
            preload: the modules that a server imports when it starts.

        Raises:
            ConnectionError: the server has ended; it has printed why.
        """
        server = rank % _NUM_SERVERS
        address = self.folder / f"server{server}"
        with open(self.folder / f"server{server}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not address.exists():
                self._start(server, address, preload)
        line = socket.socket(socket.AF_UNIX)
        line.connect(str(address))
        socket.send_fds(line, [b"\0"], _STANDARD_STREAMS)
        return Connection(line.detach())

    def end_of(self, process: int) -> str:
        """How a forked process ended: "by SIGSEGV" or "with status 1", for instance; "" if its server does not know."""
        note = self.note_of(process)
        deadline = time.monotonic() + _NOTED_S
        while not note.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not note.exists():
            return ""
        code = int(note.read_text())
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"

    def note_of(self, process: int) -> Path:
        """The file in which the server of a process records how it ended."""
        return self.folder / f"end-of-{process}"

    def _start(self, number: int, address: Path, preload: Sequence[str]) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(128)  # from now on clients may connect; the server accepts when it is ready
            told = json.dumps([listener.fileno(), str(self.folder / _OWNER), list(preload), sys.path])
            seeded = os.environ | {"PYTHONHASHSEED": str(number + 1)}
            process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, told], env=seeded, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL
            )
        self._started.append(process)


def _remove(folder: Path, owner: socket.socket, pid: int) -> None:
    if os.getpid() == pid:  # not in processes forked from it
        owner.close()
        shutil.rmtree(folder, ignore_errors=True)


def serve(work: Callable[[Connection], None]) -> None:
    """Fork a process that calls `work` for each connection, until the owner has ended.

    This runs in the interpreters that `RankServers` starts.
    """
    listening, owner_address, preload, sys.path[:] = json.loads(sys.argv[1])
    listener, owner = socket.socket(fileno=listening), socket.socket(socket.AF_UNIX)
    owner.connect(owner_address)
    for module in preload:
        importlib.import_module(module)
    _check_single_thread(preload)
    signal.signal(signal.SIGCHLD, lambda *_: _note_ends(Path(owner_address).parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles interrupts; the server ends with it
    while owner not in select.select([listener, owner], [], [])[0]:
        line, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            owner.close()
            _work(line, work)
        line.close()


def _check_single_thread(preload: Sequence[str]) -> None:
    """Forked processes lack the other threads, but not the locks that these held: what takes one waits for ever."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        known = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        raise RuntimeError(
            f"a process that is forked needs to have one thread, but importing {', '.join(preload)} left {threads} "
            f"(of Python, besides the main one: {', '.join(known) or 'none'}); do not preload what starts a thread"
        )


def _note_ends(folder: Path) -> None:
    """Record how each child ended, for `RankServers.end_of`."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            process, status = ended
            with suppress(FileNotFoundError):  # the owner has ended, and has removed the folder
                written = folder / f"{process}.written"
                written.write_text(str(os.waitstatus_to_exitcode(status)))
                written.rename(RankServers(folder).note_of(process))


def _work(line: socket.socket, work: Callable[[Connection], None]) -> None:
    """Call `work` in a process just forked, and exit without the interpreter's cleanup."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _, streams, _, _ = socket.recv_fds(line, 1, len(_STANDARD_STREAMS))
        for ours, theirs in zip(_STANDARD_STREAMS, streams, strict=True):
            os.dup2(theirs, ours)
            os.close(theirs)
        work(Connection(line.detach()))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
