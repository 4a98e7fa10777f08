"""A tracker of one's own: a directory of JSON lines, `$JSONL_DIR/{project}/{run id}.jsonl`."""

import json
import os
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking import TrackerUnavailableError
from flyteplugins_tracking.trackers import ClientHandle, RunRequest, Tracker, run_config


class JsonlTracker(Tracker):
    name = "jsonl"
    title = "JSON lines"
    run_id_variables = ("JSONL_RUN_ID",)
    lacks = {"offline": "its files are local anyway", "media": "it takes what JSON takes"}

    def open(self, request: RunRequest) -> "JsonlHandle":
        return JsonlHandle(request, self.title)


class JsonlHandle(ClientHandle):
    def __init__(self, request: RunRequest, title: str) -> None:
        super().__init__(request, title)
        folder = os.path.join(os.environ.get("JSONL_DIR", "."), request.config.project or "default")
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(os.path.join(folder, f"{self.id}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise TrackerUnavailableError(f"{folder} cannot be written: {error}. Set JSONL_DIR") from error
        if request.plan.primary:
            self._add({"config": run_config(request), "group": request.config.group or request.plan.group})

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        self._add({**row, "step": step})

    def end(self, exit_code: int) -> None:
        if self.request.plan.primary:
            self._add({"exit_code": exit_code})

    def _add(self, line: Mapping[str, Any]) -> None:
        os.write(self._file, f"{json.dumps(line)}\n".encode())  # in one piece, behind what other ranks have written
