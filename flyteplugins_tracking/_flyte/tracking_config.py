"""`tracking_config`: arguments of `tracking_init` for what is called in a block, or by a run of Flyte 2."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from flyteplugins_tracking._config import propagation
from flyteplugins_tracking._config.config import TrackingConfig, merged
from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.registry import check_propagated

# The blocks that this thread or coroutine is in. Several may be in one object's at once.
_Entered = tuple["PropagatedConfig", AbstractContextManager[None]]
_entered: ContextVar[tuple[_Entered, ...]] = ContextVar("flyteplugins_tracking_blocks", default=())


class PropagatedConfig(dict[str, str]):
    """A mapping for `flyte.with_runcontext(custom_context=...)` or environment variables; and a context manager.

    In its block it reaches the decorated functions and the tasks of Flyte 2 that are called there, and the processes
    that are started there. What an enclosing block says holds where this one says nothing.
    """

    def __init__(self, key: str, value: Mapping[str, Any], what: str) -> None:
        super().__init__({key: propagation.write(value, what)})
        self._entered: list[_Entered] = []

    def __reduce__(self) -> Any:
        """A mapping is what travels."""
        return dict, (dict(self),)

    def __enter__(self) -> PropagatedConfig:
        """Enter the block."""
        over = {key: merged(flyte_context.propagated(key), propagation.parse(self[key], key)) for key in self}
        block = flyte2.propagate({key: propagation.write(value, key) for key, value in over.items()})
        block.__enter__()
        entered = (self, block)
        self._entered.append(entered)
        _entered.set((*_entered.get(), entered))
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the block."""
        own = [entered for entered in _entered.get() if entered[0] is self]
        entered = own[-1] if own else self._entered.pop()  # by another coroutine, perhaps
        _entered.set(tuple(other for other in _entered.get() if other is not entered))
        self._entered[:] = [other for other in self._entered if other is not entered]
        entered[1].__exit__(*error)


def tracking_config(**options: Any) -> PropagatedConfig:
    """Arguments for the decorated functions and tasks that are called, where their decorators say nothing.

    As a context manager, for what is called in its block. As a mapping, for a whole run of Flyte 2:
    `flyte.with_runcontext(custom_context=tracking_config(project="llm"))`; and for the environment of a flytekit task
    or a torchrun job: `@task(environment=tracking_config(project="llm"))`, `os.environ.update(tracking_config(...))`.
    It is one JSON value under one key, `FLYTE_TRACKING_CONFIG`, so that every text comes back as the text it was.

    The order: the decorator's arguments, then those that Flyte 2's run carries, then those of blocks in this process,
    then the environment variable, then the defaults. The run's `config` is merged key by key in that order.

    Args:
        **options: What `tracking_init` takes, but for `secret=`, which does not travel as text.

    Raises:
        ConfigError: An argument that cannot work, or that JSON cannot hold.
    """
    if "secret" in options:
        raise ConfigError("secret= is read where the run is opened, and is not propagated: pass it to tracking_init")
    config = TrackingConfig.from_arguments(options)
    check_propagated(config)
    return PropagatedConfig(propagation.CONFIG, config.arguments, "tracking_config")
