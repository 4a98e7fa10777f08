"""Adapt what the decorator is put on: a function, or a task object of Flyte."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking import propagation
from flyteplugins_tracking.config import TrackingConfig
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.integrations import flyte, flytekit
from flyteplugins_tracking.lifecycle import Surroundings, Task
from flyteplugins_tracking.policy import Workers


@dataclass(frozen=True)
class Decorator:
    """What is put on a function or task.

    Attributes:
        name: What messages call it.
        links: Gives the links that a Flyte 2 task gains: by its workers, None for one without, and by itself.
        link: Gives what flytekit's task template gains: by the task, None for a function that is still to become one.
    """

    name: str
    links: Callable[[Workers | None, Any], Iterable[Any]]
    link: Callable[[Any], Mapping[str, str]]

    @classmethod
    def of_runs(cls, name: str, config: TrackingConfig) -> Decorator:
        """One whose links lead to the runs that `config` asks for."""
        return cls(
            name,
            lambda workers, task: flyte.run_links(config, workers, task),
            lambda task: flytekit.run_link(config, task),
        )


def adapt(target: Any, wrap: Callable[[Any, Task | None], Any], decorator: Decorator) -> Any:
    """Put `wrap` around the function in `target`. A task object is changed in place and stays the same object.

    Args:
        target: A function, or a task.
        wrap: Gives the tracked function for a function. Its other argument is the task that it is of.
        decorator: What `wrap` belongs to.

    Raises:
        ConfigError: `target` cannot be tracked.
    """
    if flyte.is_entity(target):
        return flyte.adapt_task(target, wrap, decorator.name, decorator.links)
    if flytekit.is_entity(target):
        return flytekit.adapt_task(target, wrap, decorator.name, decorator.link)
    _refuse_what_is_no_function(target, decorator.name)
    return flytekit.adapt_function(wrap(target, None), decorator.link)


@dataclass(frozen=True)
class Callee:
    """What runs in each process of a job.

    Attributes:
        function: The function itself.
        is_task: Whether it is of a task.
        workers: The workers that the task asks for, as far as its configuration is known; None for none of its own.
    """

    function: Callable[..., Any]
    is_task: bool = False
    workers: Workers | None = None


def callee_of(target: Any) -> Callee:
    """What the processes of a job call that runs `target`, a function or a task.

    Raises:
        ConfigError: It is neither.
    """
    for sdk in (flyte, flytekit):
        if sdk.is_entity(target):
            function, workers = sdk.function_of(target)
            return Callee(function, True, workers)
    if not callable(target) or inspect.isclass(target):
        raise ConfigError(f"{target!r} is no function and no Flyte task")
    return Callee(target)


def surroundings() -> Surroundings:
    """What the system that called the function knows, read when it is called.

    Raises:
        ConfigError: What is propagated to the function is malformed.
    """
    found = flyte.surroundings() or flytekit.surroundings()
    return found or Surroundings(propagated=propagation.read(propagation.CONFIG, None))


def propagated(key: str) -> dict[str, Any]:
    """What is propagated under `key` to the function that runs here.

    Raises:
        ConfigError: It is malformed.
    """
    return propagation.read(key, flyte.carried())


def _refuse_what_is_no_function(target: Any, name: str) -> None:
    if isinstance(target, str):
        raise ConfigError(f"{name} takes the function, not {target!r}: write @{name}(project={target!r})")
    if isinstance(target, (staticmethod, classmethod, property)):
        raise ConfigError(f"put @{name} below @{type(target).__name__}, on the function itself")
    if inspect.isclass(target) or not callable(target):
        raise ConfigError(f"{name} decorates functions and Flyte tasks, not {target!r}")
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigError(
            f"{getattr(target, '__qualname__', target)} is a generator: its body runs after the call has returned, "
            "outside of the run. Decorate the function that consumes it."
        )
