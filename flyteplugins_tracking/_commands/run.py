"""`flyteplugins-tracking run`: run a script that knows nothing of this library, with a run of `tracking_run`.

The first `wandb.init(...)` of the script, or of a framework that it uses, opens the run. Under torchrun:
`torchrun --nproc-per-node=8 -m flyteplugins_tracking run --project llm train.py --lr 1e-3`.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import runpy
import sys
import threading
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from flyteplugins_tracking._commands.run_options import parsed
from flyteplugins_tracking._util.threads import wait_as_at_exit
from flyteplugins_tracking.errors import TrackingError

# What Python itself calls for `-m`. Its name has an underscore, and does not change.
_RUNPY: Any = runpy


def main(arguments: list[str]) -> int:
    """Run the script, and return the exit status of the process if no exception ends it."""
    run, is_module, words = parsed(arguments)
    sys.argv = ["-m" if is_module else words[0], *words[1:]]
    start = functools.partial(_module if is_module else _script, words[0])
    has_begun = False
    try:
        with run:
            has_begun = True
            _call(start)
    except BaseException as error:
        if isinstance(error, TrackingError) and not has_begun:
            sys.stderr.write(f"flyteplugins-tracking run: {error}\n")
            return 1
        if isinstance(error, SystemExit):  # its text has been shown
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        if error is getattr(sys, "last_value", None):
            sys.excepthook = lambda *_: None  # it has been shown
        raise
    return 0


def _call(start: Callable[[], object]) -> None:
    """Run a script to its end, which is that of its threads, and show what it raises, as Python does."""
    before = threading.enumerate()
    try:
        start()
    except BaseException as error:
        _show(error)
        raise
    finally:
        wait_as_at_exit(before)


def _show(error: BaseException) -> None:
    """Show what ends the script, before its threads have ended, as Python does. An excepthook may be the script's."""
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        return
    frames = _of_script(error).__traceback__
    vars(sys).update(last_type=type(error), last_value=error, last_traceback=frames, last_exc=error)
    sys.excepthook(type(error), error, frames)


def _of_script(error: BaseException) -> BaseException:
    """Leave out this module's frames at the beginning of a traceback: there are no others in a SyntaxError's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    return error.with_traceback(frames)


def _module(name: str) -> None:
    """As `python -m name`."""
    if not _is_safe():
        sys.path[0] = os.getcwd()
    _new_main()
    _RUNPY._run_module_as_main(name)


def _script(path: str) -> None:
    """As `python path`: of a file, which may be a pipe."""
    file = os.path.join(os.getcwd(), path)
    if not _is_safe():
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    names = vars(_new_main())
    names.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    exec(compile(source, file, "exec", dont_inherit=True), names)  # noqa: S102


def _new_main() -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    return main


def _is_safe() -> bool:
    """Whether Python has put no directory of the script before the others: `python -P`, or `-I`."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))  # Python 3.10 has only `-I`
