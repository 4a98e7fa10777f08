"""`tracking_config`: arguments of `tracking_init` for the functions called in a block, or in a run of Flyte 2."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.config import TrackingConfig, merged
from flyteplugins_tracking.trackers.registry import check_propagated

# The blocks that this thread or coroutine is in.
_entered: ContextVar[tuple[AbstractContextManager[None], ...]] = ContextVar("flyteplugins_tracking_blocks", default=())


class PropagatedConfig(dict[str, str]):
    """A mapping for `flyte.with_runcontext(custom_context=...)` or environment variables; and a context manager.

    In its block, the arguments reach the decorated functions and the tasks of Flyte 2 that are called, and the
    processes that are started. Arguments of an enclosing block apply unless this block sets them. A thread that
    inherits no context has what a process would have: the arguments of the block that was entered last.
    """

    def __init__(self, key: str, value: Mapping[str, Any], owner: str) -> None:
        super().__init__({key: propagation.write(value, owner)})
        self._open: list[AbstractContextManager[None]] = []  # of several coroutines, or one in another

    def __reduce__(self) -> Any:
        """Pickle the mapping only."""
        return dict, (dict(self),)

    def __enter__(self) -> PropagatedConfig:
        """Enter the block."""
        merged_values = {key: merged(flyte_context.propagated(key), propagation.parse(self[key], key)) for key in self}
        block = flyte2.propagate({key: propagation.write(value, key) for key, value in merged_values.items()})
        block.__enter__()
        self._open.append(block)
        _entered.set((*_entered.get(), block))
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the block."""
        own = [block for block in _entered.get() if block in self._open]
        block = (own or self._open)[-1]  # another coroutine may have entered it
        _entered.set(tuple(other for other in _entered.get() if other is not block))
        self._open.remove(block)
        block.__exit__(*error)


def tracking_config(**options: Any) -> PropagatedConfig:
    """Set arguments for the decorated functions and tasks that are called, unless their decorators set them.

    As a context manager, it applies to the calls in its block. It is a mapping too: as `custom_context=` of
    `flyte.with_runcontext` it applies to a whole run of Flyte 2, as `environment=` of `@task` to a flytekit task, and
    after `os.environ.update(...)` to this process and those that it starts. The mapping has one key,
    `FLYTE_TRACKING_CONFIG`, whose value is JSON. So each value keeps its type.

    The decorator's own arguments take precedence over those of a Flyte 2 run, these over those of blocks in this
    process, these over the environment variable, and that over the defaults. The run's `config` is merged key by key in
    that order.

    Args:
        **options: The arguments of `tracking_init`, except `secret=` and a callable `primary_rank=`, which cannot be
            propagated.

    Raises:
        ConfigError: An argument cannot work, or JSON cannot hold it.
    """
    if "secret" in options:
        raise ConfigError("secret= is read where the run is opened, and is not propagated: pass it to tracking_init")
    if callable(options.get("primary_rank")):
        raise ConfigError(
            "primary_rank= is a callable, which cannot be propagated as text: propagate an int such as -1, or pass the "
            "callable to tracking_init"
        )
    config = TrackingConfig.from_arguments(options)
    check_propagated(config)
    return PropagatedConfig(propagation.CONFIG, config.arguments, "tracking_config")
