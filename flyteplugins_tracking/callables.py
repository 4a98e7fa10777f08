"""What kind of function something is, without `inspect` where that would have to be loaded: it takes 10 ms."""

from __future__ import annotations

import sys
from types import FunctionType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# https://docs.python.org/3/library/inspect.html#code-objects-bit-flags
_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200


def is_async(function: Any) -> bool:
    """Whether calling `function` gives a coroutine; also for an object whose call is async."""
    if _tells_by_its_code(function):
        return bool(function.__code__.co_flags & _COROUTINE)
    import inspect

    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_generator(function: Any) -> bool:
    """Whether the body of `function` runs after the call has returned, as something iterates."""
    if _tells_by_its_code(function):
        return bool(function.__code__.co_flags & (_GENERATOR | _ASYNC_GENERATOR))
    import inspect

    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _tells_by_its_code(function: Any) -> bool:
    """Where `inspect` is not loaded, nobody can have marked the function with it as a coroutine function."""
    return type(function) is FunctionType and "inspect" not in sys.modules
