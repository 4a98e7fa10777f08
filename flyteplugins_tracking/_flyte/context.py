"""What is common to both SDKs of Flyte: the target of a decorator, and the context of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from flyteplugins_tracking._flyte.target import Decorator
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.context import ExecutionContext, ProcessContext, Task
from flyteplugins_tracking.errors import ConfigError

# The flags of code objects, as in `inspect`, which few ranks have to import.
_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200


def adapt(target: Any, wrap: Callable[[Any, Task | None], Any], decorator: Decorator) -> Any:
    """Put `wrap` around the function in `target`. A task object is changed in place and stays the same object.

    Args:
        target: A function, or a task.
        wrap: Returns the tracked function. Called with the function, and the task that it belongs to or None.
        decorator: The decorator of `wrap`.

    Raises:
        ConfigError: `target` cannot be tracked.
    """
    for sdk in loaded_sdks() if type(target) is not FunctionType else ():
        if sdk.is_entity(target):
            function, workers = sdk.function_of(target, f"put {decorator.name} on the Python task that trains")
            if workers is not None and is_async(function):
                raise ConfigError(
                    f"{target.name!r} is async and has workers of its own, which run plain functions only: write "
                    "`def`, not `async def`"
                )
            return sdk.adapt_task(target, workers, wrap, decorator)
    _refuse_other_targets(target, decorator.name)
    tracked = wrap(target, None)
    if "flytekit" not in sys.modules:
        return tracked
    from flyteplugins_tracking._flyte import flyte1

    return flyte1.adapt_function(tracked, decorator)


def loaded_sdks() -> Sequence[Any]:
    """Return the module `flyte2` or `flyte1` of each SDK that the user's code has loaded.

    No generator: Python ignores what a handler of the program's raises while one is closed.
    """
    sdks: list[Any] = []
    if "flyte" in sys.modules:
        from flyteplugins_tracking._flyte import flyte2

        sdks.append(flyte2)
    if "flytekit" in sys.modules:
        from flyteplugins_tracking._flyte import flyte1

        sdks.append(flyte1)
    return sdks


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` returns a coroutine. Objects with an async `__call__` count too."""
    if _is_plain(function):
        return bool(function.__code__.co_flags & _COROUTINE)
    import inspect

    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _is_plain(function: object) -> bool:
    """Whether `inspect` could say no more of a function than its code does."""
    return type(function) is FunctionType and not function.__dict__


def current_context() -> ExecutionContext:
    """Return the execution context of the platform that calls the function.

    Raises:
        ConfigError: The propagated arguments are malformed.
    """
    for sdk in loaded_sdks():
        context: ExecutionContext | None = sdk.current_context()
        if context is not None:
            return context
    return ProcessContext(propagated=propagation.read(propagation.CONFIG, None))


def propagated(key: str) -> dict[str, Any]:
    """Return the arguments that are propagated under `key` to the function that runs here.

    Raises:
        ConfigError: The propagated arguments are malformed.
    """
    from flyteplugins_tracking._flyte import flyte2

    return propagation.read(key, flyte2.custom_context())


def _refuse_other_targets(target: Any, name: str) -> None:
    if isinstance(target, str):
        raise ConfigError(f"{name} takes the function, not {target!r}: write @{name}(project={target!r})")
    if isinstance(target, (staticmethod, classmethod, property)):
        raise ConfigError(f"put @{name} below @{type(target).__name__}, on the function itself")
    if isinstance(target, type):
        raise ConfigError(
            f"{name} decorates functions and Flyte tasks, not the class {target.__qualname__}: put it on the method "
            "that trains, for instance `fit`"
        )
    if not callable(target):
        raise ConfigError(f"{name} decorates functions and Flyte tasks, not {target!r}")
    if _is_generator_function(target):
        raise ConfigError(
            f"{getattr(target, '__qualname__', target)} is a generator function: its body would run after the call, "
            "outside of the run. Decorate the function that consumes the generator."
        )


def _is_generator_function(target: Any) -> bool:
    if _is_plain(target):
        return bool(target.__code__.co_flags & (_GENERATOR | _ASYNC_GENERATOR))
    import inspect

    return inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target)
