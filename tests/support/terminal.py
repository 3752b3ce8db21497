"""A terminal in place of stderr: all that was written to it, and what is on its screen then."""

from __future__ import annotations

import os
import pty
import re
import sys
from threading import Condition, Thread
from types import TracebackType

_TOKENS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


class Terminal:
    """Within, sys.stderr is a terminal of 120 columns."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._has_more = Condition()

    def __enter__(self) -> Terminal:
        os.environ |= {"TERM": "xterm", "COLUMNS": "120"}
        self._own, theirs = pty.openpty()
        self._reader = Thread(target=self._read)
        self._reader.start()
        self._before, sys.stderr = sys.stderr, os.fdopen(theirs, "w")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.stderr.close()
        sys.stderr = self._before
        self._reader.join()
        os.close(self._own)

    @property
    def written(self) -> str:
        """All text, with what moves the cursor and clears lines."""
        return b"".join(self._parts).decode()

    def wait_for(self, text: str) -> None:
        """Wait until `text` has been written."""
        with self._has_more:
            self._has_more.wait_for(lambda: text in self.written, timeout=60)

    @property
    def screen(self) -> list[str]:
        """The lines that are left."""
        lines, row, column = [""], 0, 0
        for token in _TOKENS.findall(self.written):
            if token == "\r":
                column = 0
            elif token == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif token == "\x1b[1A":
                row -= 1
            elif token == "\x1b[2K":
                lines[row] = ""
            elif not token.startswith("\x1b"):
                lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
                column += len(token)
        return [line.rstrip() for line in lines if line.strip()]

    def _read(self) -> None:
        try:
            while part := os.read(self._own, 65536):
                with self._has_more:
                    self._parts.append(part)
                    self._has_more.notify_all()
        except OSError:  # which Linux raises where others return nothing: the other end is closed
            pass
