"""What opens runs in the clients of services: in a recorded function, it returns the recorded run, and opens none."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from flyteplugins_tracking._runs.calls import get_run, here, state
from flyteplugins_tracking._util.modules import replace_function, when_loaded
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.testing.recorder import Run, without_run

_OPENINGS = {"wandb": "init", "mlflow": "start_run", "trackio": "init", "pluto": "init"}
# The arguments that describe a run, by the names that MLflow has for them.
_DESCRIBING = {"name": "run_name", "notes": "description"}


@contextlib.contextmanager
def recorded_openings() -> Iterator[None]:
    """Have `wandb.init` and the like return the recorded run in functions whose runs are recorded."""
    with contextlib.ExitStack() as undo:
        for tracker, name in _OPENINGS.items():
            undo.callback(when_loaded(tracker, functools.partial(_record, tracker, name, undo)))
        yield


def _record(tracker: str, name: str, undo: contextlib.ExitStack) -> None:
    original = getattr(sys.modules[tracker], name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def opened(*args: Any, **kwargs: Any) -> Any:
        call = here()
        if all(running.asked.world.is_real for running in (state.calls if call is None else [call])):
            return original(*args, **kwargs)
        given, run = signature.bind(*args, **kwargs).arguments, get_run(tracker)
        if not isinstance(run, Run) or given.get("nested"):
            return without_run()
        _describe(run, given)
        return run

    replace_function(original, opened)
    undo.callback(replace_function, opened, original)


def _describe(run: Run, given: Any) -> None:
    """Add what the call says, and the decorator does not."""
    with contextlib.suppress(ConfigError):  # another rank describes the run
        run.config.setdefaults(plain_config(given.get("config") or None))
    for name, other in _DESCRIBING.items():
        setattr(run, name, getattr(run, name) or given.get(name) or given.get(other) or None)
    tags = given.get("tags") or ()
    if not hasattr(tags, "keys"):  # MLflow's have values
        run.tags = tuple(dict.fromkeys((*run.tags, *((tags,) if isinstance(tags, str) else tags))))
