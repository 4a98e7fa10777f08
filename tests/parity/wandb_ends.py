"""The ends of a program with W&B: each has a process of its own, and none calls `finish` unless that is the case."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import wandb

from parity.table import TABLES, Body

TABLE = TABLES["wandb"]

end, full_end = TABLE.program("end"), TABLE.program("end", is_full=True)


def differs(difference: str, is_full: bool = True) -> Callable[[Body], Body]:
    return TABLE.program("end", differs=difference, is_full=is_full)


class OwnError(Exception):
    """An exception that is nobody's but the program's."""


@end
def returns(run: Any) -> None:
    run.log({"x": 1})


@full_end
def raises(run: Any) -> NoReturn:
    run.log({"x": 1})
    raise ValueError("made to fail")


@full_end
def raises_a_group(run: Any) -> NoReturn:
    if sys.version_info < (3, 11):
        raise OwnError("no groups here")
    raise ExceptionGroup("two", [ValueError("a"), OSError("b")])  # noqa: F821


@full_end
def raises_a_base_exception(run: Any) -> NoReturn:
    class Own(BaseException):
        pass

    raise Own("made to fail")


@full_end
def sys_exit_0(run: Any) -> NoReturn:
    sys.exit(0)


@end
def sys_exit_3(run: Any) -> NoReturn:
    run.log({"x": 1})
    sys.exit(3)


@full_end
def sys_exit_with_a_text(run: Any) -> NoReturn:
    sys.exit("made to fail")


@differs("exit_code")
def sys_exit_true(run: Any) -> NoReturn:
    sys.exit(True)


@differs("exit_code")
def sys_exit_256(run: Any) -> NoReturn:
    sys.exit(256)


@differs("system_exit")
def system_exit_caught(run: Any) -> None:
    with contextlib.suppress(SystemExit):
        sys.exit(3)
    run.log({"x": 1})


@differs("system_exit")
def system_exit_in_a_thread(run: Any) -> None:
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    run.log({"x": 1})


@full_end
def an_exception_in_a_thread(run: Any) -> None:
    def fail() -> NoReturn:
        raise OwnError("in a thread")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    run.log({"x": 1})


@differs("ctrl_c", is_full=False)
def keyboard_interrupt(run: Any) -> NoReturn:
    run.log({"x": 1})
    raise KeyboardInterrupt


@differs("ctrl_c")
def sigint(run: Any) -> None:
    run.log({"x": 1})
    signal.raise_signal(signal.SIGINT)


@differs("sigterm", is_full=False)
def sigterm(run: Any) -> None:
    run.log({"x": 1})
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)


def sigterm_with_a_handler_that_exits(run: Any) -> None:
    run.log({"x": 1})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)


@full_end
def sigterm_ignored(run: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)
    run.log({"x": 1})


@full_end
def sigalrm_that_raises(run: Any) -> None:
    def ring(*_: object) -> NoReturn:
        raise TimeoutError("a watchdog")

    signal.signal(signal.SIGALRM, ring)
    signal.raise_signal(signal.SIGALRM)


@full_end
def sigkill(run: Any) -> None:
    run.log({"x": 1})
    os.kill(os.getpid(), signal.SIGKILL)


@full_end
def os_exit(run: Any) -> None:
    run.log({"x": 1})
    os._exit(5)


@differs("at_exit")
def an_exit_function(run: Any) -> None:
    atexit.register(print, "SAID at exit")
    run.log({"x": 1})


@differs("at_exit")
def a_row_at_exit(run: Any) -> None:
    run.log({"x": 1})
    atexit.register(run.log, {"x": 2})


@full_end
def an_exit_function_that_raises(run: Any) -> None:
    atexit.register(lambda: 1 / 0)


@full_end
def a_generator_that_is_closed(run: Any) -> None:
    def rows() -> Iterator[int]:
        try:
            yield 1
        finally:
            run.log({"closed": 1})

    generator = rows()
    next(generator)
    generator.close()


@full_end
def asyncio_that_raises(run: Any) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OwnError("in a task")

    asyncio.run(fail())


@full_end
def asyncio_that_is_cancelled(run: Any) -> None:
    async def rows() -> AsyncIterator[int]:
        yield 1
        raise asyncio.CancelledError

    async def consume() -> None:
        async for _ in rows():
            run.log({"x": 1})

    asyncio.run(consume())


@end
def click_exit(run: Any) -> NoReturn:
    """A command of click, which turns its own exceptions into exit codes."""
    _click(run, lambda: click.get_current_context().exit(3))


@full_end
def click_usage_error(run: Any) -> NoReturn:
    def fail() -> NoReturn:
        raise click.UsageError("wrong use")

    _click(run, fail)


def _click(run: Any, act: Any) -> NoReturn:
    @click.command()
    def command() -> None:
        run.log({"x": 1})
        act()

    command.main([])
    raise AssertionError("click ends the process")


@end
def finish_with_a_code(run: Any) -> None:
    run.log({"x": 1})
    run.finish(exit_code=3)


@full_end
def finish_with_a_code_and_exit(run: Any) -> NoReturn:
    run.finish(3)
    sys.exit(3)


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
def finish_twice(run: Any) -> None:
    run.finish()
    run.finish()
    wandb.finish()


@full_end
def a_with_block_that_raises(run: Any) -> None:
    with run:
        run.log({"x": 1})
        raise OwnError("in the block")


@full_end
def a_failure_that_is_handled(run: Any) -> None:
    try:
        raise OwnError("handled")
    except OwnError:
        run.log({"x": 1})


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


@TABLE.program("ranks end", is_full=True)
def both_ranks_return(run: Any) -> None:
    if run is not None:
        run.log({"x": 1})


@TABLE.program("ranks end", is_full=True)
def the_rank_with_the_run_raises(run: Any) -> None:
    if run is not None:
        raise OwnError("made to fail")
    threading.Event().wait(60)  # until torchrun ends it


@TABLE.program("ranks end", differs="other_rank", is_full=True)
def the_other_rank_raises(run: Any) -> None:
    if run is not None:
        run.log({"x": 1})
        Path("logged").touch()
        threading.Event().wait(60)
    while not Path("logged").exists():
        time.sleep(0.01)
    raise OwnError("made to fail")
