"""`tracking_run`: the form of `tracking_init` for code that is no function, such as the body of a script."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Any, NoReturn

from flyteplugins_tracking._runs.call import here
from flyteplugins_tracking._runs.context import ProcessContext
from flyteplugins_tracking._util.signals import critical_section
from flyteplugins_tracking.decorator import call_of
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.registry import check_config

logger = logging.getLogger(__name__)

# How long a signal waits for a run that is being opened or closed.
_PATIENCE_S = 5.0


class tracking_run:  # noqa: N801 it is used as a function, like `tracking_init`
    """Give the block of a `with` its run, on the ranks that should have one: what `tracking_init` does for a function.

    `with tracking_run(...) as run:` gives the tracker's own run object, or None on a rank without a run. The run ends
    with the block, and with its status: 0, 1 for an exception, the code of a SystemExit, 143 after a SIGTERM. Decorated
    functions that the block calls, and blocks in it, join the run. `async with` does the same.

    An object stands for one block: make another one for the next block. Not for Flyte tasks, which take the decorator.

    Args:
        **arguments: Those of `tracking_init`.

    Raises:
        ConfigError: An argument is invalid; or the block is entered again, in a Flyte task, or by a child process of
            multiprocessing that imports the script.
        TrackingError: As `tracking_init`, when the block is entered.
    """

    def __init__(self, **arguments: Any) -> None:
        self._config = TrackingConfig.from_arguments(arguments)
        check_config(self._config)
        self._was_entered = False

    @critical_section(_PATIENCE_S)
    def __enter__(self) -> Any:
        self._call = call_of(self._config, None)
        self._check()
        self._was_entered = True
        self._call.__enter__()
        return None if self._call.run is None else self._call.run.handle.run

    @critical_section(_PATIENCE_S)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:
            text = "%s: the generator with this block was closed before its end, so its run fails: use it in a `with`"
            logger.warning(text, self._call.tracker.name)
        self._call.__exit__(kind, error, traceback)

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, *_: object) -> NoReturn:
        """Refuse to be a decorator."""
        raise ConfigError("tracking_run(...) is for `with`: put @tracking_init(...) on a function")

    def _check(self) -> None:
        if self._was_entered:
            raise ConfigError("this tracking_run(...) has had its block: make another one for the next block")
        if not isinstance(self._call.context, ProcessContext) and not self._call.is_simulated and here() is None:
            raise ConfigError("tracking_run(...) is not for Flyte tasks: put @tracking_init(...) on the task")
        process = sys.modules.get("multiprocessing.process")
        if process is not None and getattr(process.current_process(), "_inheriting", False):
            raise ConfigError(
                "multiprocessing imports the script again in a child process, which would open a run too: put the "
                "block below `if __name__ == '__main__':`"
            )
