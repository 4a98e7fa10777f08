"""Adapt what the decorator is put on: a function, or a task object of Flyte."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flyteplugins_tracking import propagation
from flyteplugins_tracking.config import TrackingConfig
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.integrations import flyte, flytekit
from flyteplugins_tracking.lifecycle import Surroundings, Task


def adapt(target: Any, wrap: Callable[[Any, Task | None], Any], config: TrackingConfig) -> Any:
    """Put `wrap` around the function in `target`. A task object is changed in place and stays the same object.

    Args:
        target: A function, or a task.
        wrap: Gives the tracked function for a function. Its other argument is the task that it is of.
        config: What the user asked for; Flyte's console links to the runs by it.

    Raises:
        ConfigError: `target` cannot be tracked.
    """
    if flyte.is_entity(target):
        return flyte.adapt_task(target, wrap, config)
    if flytekit.is_entity(target):
        return flytekit.adapt_task(target, wrap, config)
    _refuse_what_is_no_function(target)
    return flytekit.adapt_function(wrap(target, None), config)


def surroundings() -> Surroundings:
    """What the system that called the function knows, read when it is called.

    Raises:
        ConfigError: What is propagated to the function is malformed.
    """
    found = flyte.surroundings() or flytekit.surroundings()
    return found or Surroundings(propagated=propagation.read(propagation.CONFIG, {}))


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
