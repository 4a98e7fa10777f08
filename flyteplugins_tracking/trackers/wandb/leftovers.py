"""Remove the files of a failed `wandb.init`."""

from __future__ import annotations

import contextlib
import shutil
import traceback
from pathlib import Path

# wandb-core adds these to each row of a run's history.
_ROW_KEYS = (b"_step", b"_timestamp")
# The links beside the run directories that W&B points at the latest one.
_LINKS = ("latest-run", "debug.log", "debug-internal.log")


def remove_failed_run(failure: BaseException | None) -> None:
    """Remove the run directory of the `wandb.init` that raised `failure`.

    Call it once the run is open in another directory: W&B's links point there then. A directory stays if it has rows,
    if a link points into it, or if this version of W&B does not report its directory.
    """
    directory = _failed_directory(failure)
    if directory is None:
        return
    with contextlib.suppress(OSError):  # an empty directory harms less than a training that fails
        if directory.is_dir() and not has_rows(directory) and not _is_linked(directory):
            shutil.rmtree(directory, ignore_errors=True)


def has_rows(directory: Path) -> bool:
    """Whether a run directory's transaction log has rows."""
    return any(key in log.read_bytes() for log in directory.glob("*.wandb") for key in _ROW_KEYS)


def _failed_directory(failure: BaseException | None) -> Path | None:
    # W&B does not report the directory before wandb.init returns. The name would not show its owner: several ranks may
    # open runs with one id in one second. In this frame of W&B's, its settings are final and the directory is made.
    for frame, _ in traceback.walk_tb(failure.__traceback__ if failure is not None else None):
        if frame.f_globals.get("__name__") == "wandb.sdk.wandb_init" and frame.f_code.co_name == "init":
            sync_dir = getattr(frame.f_locals.get("settings"), "sync_dir", None)
            if sync_dir and "self" in frame.f_locals:  # the method, and not wandb.init itself
                return Path(sync_dir)
    return None


def _is_linked(directory: Path) -> bool:
    inside = directory.resolve()
    return any((directory.parent / link).resolve().is_relative_to(inside) for link in _LINKS)
