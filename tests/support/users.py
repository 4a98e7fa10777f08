"""Another user of the machine: what it does is done by a forked child with its user id. Only root can do so."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(function: Callable[[], object]) -> None:
    """Call `function` as the user nobody, and wait for it. It must not import anything."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
