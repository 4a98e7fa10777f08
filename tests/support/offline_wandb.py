"""An offline W&B run in this process, for tests of what stands beside the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def open_run(run_id: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a run whose file has each row within 0.1 s. The caller ends it."""
    import wandb

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SAVE_REQUIREMENTS", "false")  # the list of all packages: it takes time
    monkeypatch.chdir(directory)
    quick = wandb.Settings(x_transaction_log_flush_interval=0.1)
    return wandb.init(mode="offline", project="p", id=run_id, dir=directory, settings=quick)
