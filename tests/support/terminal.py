"""Run a program in a terminal, and wait for what it shows there."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from support import jobs

ROWS, COLUMNS = 45, 150
_PRESSED_S = 3.0
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[ -/]*[@-~]|\].*?(?:\x07|\x1b\\))")


class Terminal:
    """A command line that runs in a pseudo-terminal until the block ends."""

    def __init__(self, command: str, directory: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=directory,
            env=jobs.environment(directory, TERM="xterm-256color"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._output = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # and what it has started: the viewer is another process
        self._process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """All that it has written so far, without escape sequences."""
        return _ESCAPES.sub("", self._output.decode(errors="replace"))

    def wait_for(self, *patterns: str, timeout_s: float = 60, presses: Sequence[bytes] = ()) -> None:
        """Wait until each of the regular expressions has been found in the text.

        Args:
            *patterns: The regular expressions.
            timeout_s: How long to wait, in seconds.
            presses: The keys that are pressed meanwhile, in turn, one every few seconds.
        """
        deadline, pressed_at = time.monotonic() + timeout_s, time.monotonic()
        keys = itertools.cycle(presses)
        while missing := [pattern for pattern in patterns if not re.search(pattern, self.text)]:
            assert time.monotonic() < deadline, f"{missing} not in:\n{self.text}"
            if presses and time.monotonic() > pressed_at + _PRESSED_S:
                os.write(self._ours, next(keys))
                pressed_at = time.monotonic()
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    self._output += os.read(self._ours, 65536)
                except OSError:  # the program has ended
                    raise AssertionError(f"{missing} not in:\n{self.text}") from None
