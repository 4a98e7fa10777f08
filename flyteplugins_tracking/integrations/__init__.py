"""Adapt what the decorator is put on: a function, or a task object of Flyte."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.integrations import flytekit
from flyteplugins_tracking.lifecycle import Surroundings


def adapt(target: Any, wrap: Callable[[Any], Any], link: Mapping[str, str]) -> Any:
    """Put `wrap` around the function in `target`. A task object is changed in place and stays the same object.

    Args:
        target: A function, or a task.
        wrap: Gives the tracked function for a function.
        link: What the task template gains so that Flyte's console links to the run.

    Raises:
        ConfigError: `target` cannot be tracked.
    """
    if flytekit.is_entity(target):
        return flytekit.adapt_task(target, wrap, link)
    if _is_flyte2_task(target):
        raise ConfigError(
            f"{getattr(target, 'name', target)!r} is a task of the Flyte 2 SDK, which is not supported yet: "
            "put tracking_init on a plain function that the task calls"
        )
    _refuse_what_is_no_function(target)
    return flytekit.adapt_function(wrap(target), link)


def surroundings() -> Surroundings:
    """What the system that called the function knows, read when the run is opened."""
    return flytekit.surroundings()


def _is_flyte2_task(target: Any) -> bool:
    return any(
        (t.__module__, t.__qualname__) == ("flyte._task", "AsyncFunctionTaskTemplate") for t in type(target).__mro__
    )


def _refuse_what_is_no_function(target: Any) -> None:
    if isinstance(target, str):
        raise ConfigError(f"tracking_init takes the function, not {target!r}: write @tracking_init(project={target!r})")
    if isinstance(target, (staticmethod, classmethod, property)):
        raise ConfigError(f"put @tracking_init below @{type(target).__name__}, on the function itself")
    if inspect.isclass(target) or not callable(target):
        raise ConfigError(f"tracking_init decorates functions and Flyte tasks, not {target!r}")
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigError(
            f"{getattr(target, '__qualname__', target)} is a generator: its body runs after the call has returned, "
            "outside of the run. Decorate the function that consumes it."
        )
