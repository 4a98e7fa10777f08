"""Functions that run when the process forks. On a platform without `fork`, registering one does nothing."""

from __future__ import annotations

import os
from collections.abc import Callable


def at_fork(**hooks: Callable[[], object]) -> None:
    """Register functions for each later fork.

    Args:
        **hooks: `before`, `after_in_parent` and `after_in_child`, as `os.register_at_fork` takes them.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)


def after_fork_in_child(function: Callable[[], object]) -> Callable[[], object]:
    """Call `function` in each child that is forked from now on. Can be used as a decorator."""
    at_fork(after_in_child=function)
    return function
