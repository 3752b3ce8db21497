"""Files in memory and descriptors of processes, as the operating system's own calls give them."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys

import pytest

from fxpar.core.kernel_files import memory_file, process_file

IMPORTED_WITHOUT = """
import os
for name in ("memfd_create", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
import fxpar
mesh = fxpar.init_mesh(x=1)
from fxpar.transport.shared_segment import OwnSegment
OwnSegment(4096).bytes_at(0, 4096).fill_(7)
print(mesh.hosts)
"""


def test_a_file_in_memory_is_empty_and_named_for_proc_alone() -> None:
    fd = memory_file("fxpar-test")
    try:
        assert os.fstat(fd).st_size == 0 and not os.get_inheritable(fd)
        assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:fxpar-test (deleted)"
        assert os.write(fd, b"found") == 5
        assert os.pread(fd, 8, 0) == b"found"
    finally:
        os.close(fd)


def test_a_descriptor_of_a_process_is_readable_once_it_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fd = process_file(process.pid)
    try:
        assert not os.get_inheritable(fd)
        assert select.select([fd], [], [], 0)[0] == []
        process.communicate(b"end\n")
        assert select.select([fd], [], [], 10)[0] == [fd]
    finally:
        os.close(fd)


def test_what_the_kernel_refuses_is_an_error_with_its_number() -> None:
    with pytest.raises(ProcessLookupError):
        process_file(2**22 + 1)  # beyond the most that a kernel numbers
    with pytest.raises(OSError) as failed:
        memory_file("n" * 300)
    assert failed.value.errno == errno.EINVAL


def test_an_interpreter_without_these_functions_makes_meshes_and_segments() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED_WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(0,)"
