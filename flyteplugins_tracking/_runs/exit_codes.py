"""The status of a function: that of a process which ends as the function has."""

from __future__ import annotations

from flyteplugins_tracking._util.proc import INTERRUPTED

# click, and the packages whose exceptions are not subclasses of click's.
_CLICKS = frozenset({"click", "typer", "asyncclick", "rich_click"})


def exit_code_of(error: BaseException, successes: tuple[type[BaseException], ...] = ()) -> int:
    """Return the status of a process that ends with `error`."""
    if isinstance(error, successes):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if any(base.__module__.partition(".")[0] in _CLICKS for base in type(error).__mro__):  # none is imported
        # click ends the process with it: `Exit`, `UsageError` and other `ClickException`s; an `Abort` has none.
        code = getattr(error, "exit_code", 1)
        return code & 0xFF if isinstance(code, int) else 1
    if isinstance(error, SystemExit):
        # https://docs.python.org/3/library/exceptions.html#SystemExit
        # The system keeps the lowest 8 bits of the code, and Python makes -1 of a code that is no C integer.
        if isinstance(error.code, int):
            return error.code & 0xFF if -(2**63) <= error.code < 2**63 else 255
        return int(error.code is not None)
    return 1
