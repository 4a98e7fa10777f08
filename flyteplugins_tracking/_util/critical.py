"""Critical sections: functions that an exception out of a signal handler must not leave halfway.

A function is marked where it is written, and recognised by its code object: a move or a new name of its module changes
nothing. A class that is used in a `with` statement marks its `__enter__` and `__exit__`: between these and the block
CPython runs no signal handler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_patience_s: dict[CodeType, float] = {}


def critical_section(patience_s: float) -> Callable[[F], F]:
    """Mark a function: a signal waits for its end, and for the end of what it calls.

    Args:
        patience_s: How long the signal waits at most, in seconds. After that it interrupts the function.
    """

    def mark(function: F) -> F:
        plain: FunctionType = function  # type: ignore[assignment]
        _patience_s[plain.__code__] = patience_s
        return function

    return mark


def patience_s(code: CodeType) -> float:
    """Return the seconds that a signal waits at most for the function of this code; 0 if it is not marked."""
    return _patience_s.get(code, 0.0)
