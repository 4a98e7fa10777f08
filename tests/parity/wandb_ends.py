"""The ends of a program with W&B: each has a process of its own, and none calls `finish` unless that is the case."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from parity.table import TABLES, Body

TABLE = TABLES["wandb"]

end, full_end = TABLE.program("end"), TABLE.program("end", is_full=True)


def differs(difference: str) -> Callable[[Body], Body]:
    return TABLE.program("end", differs=difference, is_full=True)


class OwnError(Exception):
    """An exception that is nobody's but the program's."""


@end
def returns(run: Any) -> None:
    run.log({"x": 1})


@full_end
def raises(run: Any) -> NoReturn:
    run.log({"x": 1})
    raise ValueError("made to fail")


@end
def sys_exit_3(run: Any) -> NoReturn:
    run.log({"x": 1})
    sys.exit(3)


@full_end
def sys_exit_with_a_text(run: Any) -> NoReturn:
    sys.exit("made to fail")


@differs("exit_code")
def sys_exit_256(run: Any) -> NoReturn:
    sys.exit(256)


@differs("system_exit")
def system_exit_caught(run: Any) -> None:
    with contextlib.suppress(SystemExit):
        sys.exit(3)
    run.log({"x": 1})


@differs("ctrl_c")
def keyboard_interrupt(run: Any) -> NoReturn:
    run.log({"x": 1})
    raise KeyboardInterrupt


@differs("sigterm")
def sigterm(run: Any) -> None:
    run.log({"x": 1})
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)


@full_end
def sigterm_ignored(run: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)
    run.log({"x": 1})


@full_end
def sigkill(run: Any) -> None:
    run.log({"x": 1})
    os.kill(os.getpid(), signal.SIGKILL)


@full_end
def os_exit(run: Any) -> None:
    run.log({"x": 1})
    os._exit(5)


@differs("at_exit")
def a_row_at_exit(run: Any) -> None:
    run.log({"x": 1})
    atexit.register(run.log, {"x": 2})


@full_end
def click_exit(run: Any) -> NoReturn:
    """A command of click, which turns its own exceptions into exit codes."""

    @click.command()
    def command() -> None:
        run.log({"x": 1})
        click.get_current_context().exit(3)

    command.main([])
    raise AssertionError("click ends the process")


@end
def finish_with_a_code(run: Any) -> None:
    run.log({"x": 1})
    run.finish(exit_code=3)


@full_end
def a_with_block_whose_failure_is_handled(run: Any) -> None:
    with contextlib.suppress(OwnError), run:
        raise OwnError("in the block")


@differs("own_end")
def finish_and_raise(run: Any) -> NoReturn:
    run.log({"x": 1})
    run.finish()
    raise OwnError("after the finish")


@full_end
def a_with_block_that_raises(run: Any) -> None:
    with run:
        run.log({"x": 1})
        raise OwnError("in the block")


@differs("excepthook")
def an_exit_hook_of_the_program(run: Any) -> NoReturn:
    sys.excepthook = lambda *_: print("SAID by an excepthook")
    raise OwnError("made to fail")


@full_end
def a_broken_exception(run: Any) -> NoReturn:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raise BrokenError


# the ends of two ranks under torchrun


@TABLE.program("ranks end", differs="other_rank")
def the_other_rank_raises(run: Any) -> None:
    if run is not None:
        run.log({"x": 1})
        Path("logged").touch()
        threading.Event().wait(60)
    while not Path("logged").exists():
        time.sleep(0.01)
    raise OwnError("made to fail")
