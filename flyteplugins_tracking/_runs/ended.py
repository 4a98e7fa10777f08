"""What is left to do for a run that has ended: its last line, its unsent files, its task's report and output."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._util.proc import TERMINATED
from flyteplugins_tracking._util.text import printable
from flyteplugins_tracking._util.threads import run_with_timeout

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.run import Run

logger = logging.getLogger(__name__)
_UNPUBLISHED = "download_logs=True: the files did not become an output of the task"


def summary_of(run: Run, exit_code: int) -> Mapping[str, Any] | None:
    """Return the run's last values if its task shows them. A task that is terminated has no time for that."""
    if not run.opener.has_report or exit_code == TERMINATED or not run.plan.primary:
        return None
    with run.warned("the task's report shows no values of the run"):
        return run.handle.summary()
    return {}


def print_how_to_view(run: Run) -> None:
    """Print how to look at the run: one line a job, or one a worker where each worker has its run."""
    if not run.plan.primary or run.is_one_of_many or run.opener.is_simulated:
        return
    command = run.handle.how_to_view()
    if command:
        print(f"{run.tracker.name}: to look at run {run.handle.id}: {printable(command)}", file=sys.stderr)  # noqa: T201


def keep_and_show(run: Run, exit_code: int, summary: Mapping[str, Any] | None) -> None:
    """Keep what the service has not received, and show the run in its task's report. Each takes a limited time.

    Args:
        run: The run.
        exit_code: The status that it has ended with.
        summary: Its last values; None if the task does not show them.
    """
    timeout_s = run.opener.config.finish_timeout_s
    if run.opener.context.can_persist:
        run_with_timeout(timeout_s, persist, run)
    if summary is not None:
        run_with_timeout(timeout_s, run.opener.context.render_report, run, exit_code, summary)


def persist(run: Run) -> None:
    """Copy the rows that the service has not received to storage: this machine's files are lost with it."""
    if not run.opener.context.can_persist:
        return
    for directory in run.handle.unsent():
        with run.warned(f"{directory} could not be copied to storage, and is lost with this machine"):
            address, name = run.opener.context.persist(directory), os.path.basename(directory)
            logger.warning(
                "%s: rows that the service has not received are stored at %s. Download them to %s, and send them: %s",
                run.tracker.name,
                address,
                name,
                run.handle.how_to_send(name),
            )


def publish_files(run: Run, is_async: bool) -> Any:
    """Make the files of the run an output of its task: see `Call.publish_files`."""
    context = run.opener.context
    if run.opener.info is not None or not context.can_publish_files or run.handle.files is None:
        return None
    published = None
    with run.warned(_UNPUBLISHED):
        published = context.publish_files(run.handle.files, run.handle.id, is_async)
    return _awaited(run, published) if is_async and published is not None else None


async def _awaited(run: Run, published: Any) -> None:
    with run.warned(_UNPUBLISHED):
        await published
