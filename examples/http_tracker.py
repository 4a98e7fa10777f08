# A tracker for a service with HTTP: each row is a POST to $ROWS_URL/{project}/{run id}
import json
import math
import os
import queue
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking import TrackerUnavailableError, trackers


class HttpTracker(trackers.Tracker):
    name, title = "http", "HTTP"

    def open(self, request: trackers.RunRequest) -> trackers.Handle:
        return trackers.open_or_keep(request, self, lambda: HttpHandle(request))


class HttpHandle(trackers.ClientHandle):
    def __init__(self, request: trackers.RunRequest) -> None:
        super().__init__(request, "HTTP")
        self._rows: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._limit: Any = None
        address, project = os.environ["ROWS_URL"], request.config.project
        self._url = f"{address}/{project}/{self.id}"
        config = trackers.run_config(request) if request.plan.primary else None
        try:
            self._post({"config": config}, request.deadline - time.monotonic())
        except OSError as error:
            text, is_away = f"{error}.", not is_refusal(error)
            raise TrackerUnavailableError(text, is_outage=is_away) from error
        threading.Thread(target=self._send, daemon=True).start()

    def write(self, row: Mapping[str, Any], step: Any, **_: Any) -> None:
        values = {key: finite(value) for key, value in row.items()}
        self._rows.put({**values, "step": step})

    def end(self, exit_code: int) -> None:
        if self.ends_run:
            self._rows.put({"exit_code": exit_code})
        self._limit = self.end_limit()
        while self._rows.unfinished_tasks and self._limit.lasts():
            time.sleep(0.05)
        if left := self._rows.unfinished_tasks:
            raise TrackerUnavailableError(f"{left} rows are not sent")

    def _send(self) -> None:
        while True:
            row = self._rows.get()
            while not self._is_done(row):
                time.sleep(1)
            self._rows.task_done()
            if self._limit is not None:
                self._limit.moved()

    def _is_done(self, row: Mapping[str, Any]) -> bool:
        try:
            self._post(row, 10)
        except OSError as error:
            if is_refusal(error):
                print(f"a row is lost: {error}", file=sys.stderr)
            return is_refusal(error)
        return True

    def _post(self, values: Mapping[str, Any], timeout_s: float) -> None:
        body = json.dumps(values, default=str).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, kind)
        urllib.request.urlopen(request, timeout=max(1, timeout_s)).close()


def finite(value: Any) -> Any:  # JSON has no NaN
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else str(value)


def is_refusal(error: OSError) -> bool:
    # Not if it came too late or too often: it may succeed later.
    code = getattr(error, "code", 0)
    return 400 <= code < 500 and code not in (408, 425, 429)
