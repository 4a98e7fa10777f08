# Lines of JSON in $JSONL_DIR/{project}/{run id}.jsonl
import json
import os
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking import TrackerUnavailableError, trackers


class JsonlTracker(trackers.Tracker):
    name, title, run_id_variables = "jsonl", "JSON lines", ("JSONL_RUN_ID",)
    unsupported = {"offline": "it is local anyway", "media": "JSON has none"}

    def open(self, request: trackers.RunRequest) -> "JsonlHandle":
        return JsonlHandle(request, self.title)


class JsonlHandle(trackers.ClientHandle):
    def __init__(self, request: trackers.RunRequest, title: str) -> None:
        super().__init__(request, title)
        project = request.config.project or "default"
        folder = os.path.join(os.environ.get("JSONL_DIR", "."), project)
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = open(f"{folder}/{self.id}.jsonl", "ab", buffering=0)
        except OSError as error:
            raise TrackerUnavailableError(f"{error}. Set JSONL_DIR") from error
        if request.plan.primary:
            config = trackers.run_config(request)
            self._add({"config": config, "group": request.group})

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        self._add({**row, "step": step})

    def end(self, exit_code: int) -> None:
        if self.ends_run:
            self._add({"exit_code": exit_code})

    def _add(self, line: Mapping[str, Any]) -> None:
        self._file.write(f"{json.dumps(line)}\n".encode())  # in one piece
