"""Sends the lines of a Pluto run over HTTP: its rows, and what the client has prepared for its own queue."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.files import own_file_in
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers.journal import Line, event_values
from flyteplugins_tracking.trackers.outbox import THREAD, AwayError, RejectedError
from flyteplugins_tracking.trackers.pluto import vendor
from flyteplugins_tracking.trackers.pluto.vendor import ENTRIES, FILE, POST, POSTS
from flyteplugins_tracking.trackers.rows import Steps

logger = logging.getLogger(__name__)

# The service answers 422 to a row that it cannot read, and when it has troubles of its own.
_REJECTIONS = (400, 413, 422)
# The longest time for one request, in seconds. The client's own limit of 32 s is longer than a run's end waits.
REQUEST_S = 10.0
_SHORTEST_S = 0.1
_NDJSON, _JSON = "application/x-ndjson", "application/json"


class Service:
    """The service of a client's settings, with the user's proxy and certificates.

    Attributes:
        deadline: When requests must have ended, in seconds of `time.monotonic`; None if each has its own limit.
    """

    def __init__(self, settings: Any, deadline: float | None = None) -> None:
        import httpx

        _quiet_requests()
        self._settings, self.deadline = settings, deadline
        proxy = settings.http_proxy or settings.https_proxy or None
        self._client = httpx.Client(verify=not settings.insecure_disable_ssl, proxy=proxy)

    def post(self, path: str, content: str) -> Any:
        """Post to a path of the API, or of the ingest server. Returns the answer. Raises what `httpx` raises."""
        is_ingest = path.startswith("/ingest/")
        server = self._settings.url_ingest if is_ingest or path == "/step" else self._settings.url_api
        headers = {**vendor.request_headers(self._settings), "Content-Type": _NDJSON if is_ingest else _JSON}
        return self._client.post(f"{server}{path}", content=content.encode(), headers=headers, timeout=self._limit_s())

    def answers(self, number: int) -> bool:
        """Whether the service says something of the run with this number."""
        address, query = f"{self._settings.url_api}/api/runs/details/{number}", {"projectName": self._settings.project}
        try:
            headers = vendor.request_headers(self._settings)
            return bool(self._client.get(address, params=query, headers=headers, timeout=self._limit_s()).is_success)
        except Exception:
            return False

    def _limit_s(self) -> float:
        left_s = REQUEST_S if self.deadline is None else self.deadline - time.monotonic()
        return max(_SHORTEST_S, min(REQUEST_S, left_s))


@functools.cache
def _quiet_requests() -> None:
    """Keep the requests of our thread out of the user's log, as the client does with its own."""
    logging.getLogger("httpx").addFilter(lambda record: record.threadName != THREAD)


class PlutoSink:
    """Sends lines to a run. They can be sent twice: a chart has one value for a key, a step and a time.

    Attributes:
        has_files: Whether files could not be sent: they stay in the client's directory.
        is_off: Whether the client's mode is "noop": nothing is sent.
    """

    _is_uploading = False

    def __init__(
        self, op: Any, run_id: str, steps: Steps, accepted: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    ) -> None:
        """Prepare the sending.

        Args:
            op: The client's run.
            run_id: The run's id in messages.
            steps: For rows without a step, and for those of other attempts.
            accepted: Returns what the service takes of a row that was only kept.
        """
        self._accepted = accepted
        self._op, self._run_id, self._steps = op, run_id, steps
        self._service = Service(op.settings)
        self._known: dict[str, set[str]] = defaultdict(set)  # the keys that the service knows, by their type
        self._good = ""  # a row that the service has taken
        self.has_files = False
        self.is_off = op.settings.mode == "noop"
        self._warn_once = WarnOnce(logger)

    def send(self, lines: Sequence[Line], timeout_s: float | None) -> None:
        if self.is_off:
            return
        self._service.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        entries = self._entries(lines)
        self._register(entries)
        for line in lines:
            if "event" in line:
                self._post("config/update", {"config": json.dumps(event_values(line))})
            elif line.get("call") == POST:
                path, body = line["args"]
                if path in POSTS:
                    self._post(path, body)
        rejected = self._ingest(entries)
        for line in lines:
            if line.get("call") == FILE:
                self._upload(*line["args"])
        if rejected:
            raise RejectedError(f"the service cannot read its {' and '.join(rejected)}")

    def answers(self) -> bool:
        """Whether a file is being uploaded, and the service answers meanwhile."""
        return self._is_uploading and self._service.answers(self._op.id)

    def post_end(self, status: str, timeout_s: float) -> None:
        """Send the run's end.

        Raises:
            AwayError: The service has not taken it in time.
        """
        self._service.deadline = time.monotonic() + timeout_s
        self._post("status/update", {"status": status, "statusMetadata": None})

    def _entries(self, lines: Sequence[Line]) -> dict[str, list[dict[str, Any]]]:
        """Return what goes to the ingest server, by its kind. Rows come last: they would go again if others failed."""
        entries: dict[str, list[dict[str, Any]]] = {"data": [], "logs": [], "metrics": []}
        for line in lines:
            if "row" in line:
                self._add_row(line, entries)
            elif line.get("call") == ENTRIES:
                kind, of_kind = line["args"]
                entries[kind] += of_kind
        return entries

    def _add_row(self, line: Line, entries: dict[str, list[dict[str, Any]]]) -> None:
        time_ms, step = round(line["time"] * 1000), self._steps.take(line["step"])
        values = self._accepted(line["row"]) if line.get("is_kept") else line["row"]
        row = {vendor.clean(key): value for key, value in values.items()}
        if numbers := {key: value for key, value in row.items() if isinstance(value, (int, float))}:
            entries["metrics"].append({"time": time_ms, "step": step, "data": numbers})
        for key, value in row.items():
            if isinstance(value, str):
                entries["data"].append(vendor.data_entry(key, "string-series", value, time_ms, step))

    def _register(self, entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Say which keys are new. The service's pages show no others."""
        keys = {
            "METRIC": {key for entry in entries["metrics"] for key in entry["data"]},
            "DATA": {entry["logName"] for entry in entries["data"] if entry["dataType"] == "string-series"},
        }
        for kind, names in keys.items():
            if new := sorted(names - self._known[kind]):
                self._post("logName/add", {"logType": kind, "logName": new})
                self._known[kind].update(new)

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        content = json.dumps({**body, "runId": self._op.id})
        if not self._takes(f"/api/runs/{path}", content):
            self._warn_once(path, "Pluto: run %s: the service rejects %s, which is lost", self._run_id, path)

    def _ingest(self, entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        """Send entries of all kinds. Returns the kinds of which the service cannot read one, though it is well.

        Raises:
            AwayError: The service does not answer, or has troubles.
        """
        texts = {kind: [json.dumps(entry) for entry in of_kind] for kind, of_kind in entries.items() if of_kind}
        rejected = [kind for kind, rows in texts.items() if not self._takes(f"/ingest/{kind}", "\n".join(rows) + "\n")]
        if metrics := texts.get("metrics"):
            if "metrics" not in rejected:
                self._good = metrics[-1]
            elif not self._is_well(metrics):
                raise AwayError("the service rejects all rows")
        return rejected

    def _is_well(self, metrics: Sequence[str]) -> bool:
        """Whether the service takes a row that it has taken before, or the first or the last one of these."""
        for row in filter(None, (self._good, metrics[0], metrics[-1])):
            if self._takes("/ingest/metrics", row + "\n"):
                self._good = row
                return True
        return False

    def _takes(self, path: str, content: str) -> bool:
        """Post once. Returns False if the service says that it cannot read this.

        Raises:
            AwayError: The service does not answer, or has troubles.
        """
        try:
            answer = self._service.post(path, content)
        except Exception as error:
            raise AwayError(f"the service does not answer ({type(error).__name__})") from None
        if answer.status_code >= 300 and answer.status_code not in _REJECTIONS:
            raise AwayError(f"the service answers with HTTP {answer.status_code}: {answer.text[:200]}")
        return bool(answer.status_code < 300)

    def _upload(self, directory: str, name: str, record: Mapping[str, Any]) -> None:
        """Upload a file of the client's directory. The client itself tries that several times."""
        is_clients = vendor.is_clients_directory(directory, self._run_id)  # a line must not name any file of this user
        path = own_file_in(Path(directory), name) if is_clients else None
        self._is_uploading = True
        try:
            is_sent = path is not None and vendor.upload(self._op.settings, str(path), record)
        finally:
            self._is_uploading = False
        if not is_sent:
            self.has_files = True
            text = "Pluto: run %s: the file of %r could not be sent: %s"
            self._warn_once(name, text, self._run_id, record["log_name"], Path(directory, name))
